"""A batch's two views beside those that torchvision makes of the same images by the same draws."""

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.interface import Source
from dali.loader import Batch
from dali.order import view_params
from dali.spec import ViewsSpec
from dali.torchvision_reference import normalise, original, reference_view
from pipeline.pictures import contact_sheet

ROWS = 8


def views_sheet(
    source: Source, spec: ViewsSpec, channels: int, seed: int, epoch: int, batch: Batch, places: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The first images of a batch, a row each: view 1, view 2, and the same two by torchvision.

    `places` (n,) are the images whose draws the batch's have: its own, but where one stands in for a bad one. An image
    that PIL cannot read is named, and has no views by torchvision.

    Returns:
        (height, width, 3) uint8, see `pictures.contact_sheet`.
    """
    views = [view[:ROWS].float().cpu().numpy() for view in (batch.y1, batch.y2)]
    references = [np.zeros_like(view) for view in views]
    rows = [view_params(seed, epoch, places[:ROWS], view, spec, channels) for view in (0, 1)]
    for place, index in enumerate(batch.indices[:ROWS].tolist()):
        try:
            image = original(source, index, channels)
        except InputError as error:
            print(f"warning: no view by torchvision in the contact sheet: {error}", flush=True)
            continue
        for reference, params in zip(references, rows, strict=True):
            reference[place] = normalise(reference_view(image, params[place], spec), spec)
    headings = ("view 1", "view 2", "torchvision's 1", "torchvision's 2")
    return contact_sheet(dict(zip(headings, views + references, strict=True)), spec.mean, spec.std, ROWS)
