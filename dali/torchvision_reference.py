"""The same view by torchvision and PIL, from the same draws: what the DALI graph is compared with."""

import numpy as np
import torchvision.transforms.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode

from dali.operands import crop_windows
from dali.order import JITTER_OPS
from dali.spec import ViewsSpec

_ADJUST = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": F.adjust_hue,
}


def reference_view(image: NDArray[np.uint8], params: NDArray[np.void], spec: ViewsSpec) -> NDArray[np.uint8]:
    """One view of an (H, W, C) image from one row of `order.view_params`: (S, S, C) bytes, before normalisation.

    The operators and their order are the reference recipe's (facebookresearch/barlowtwins, class Transform).
    """
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    corner, extent = crop_windows(params[None], np.array([image.shape[:2]]), spec)
    view = F.resized_crop(
        picture,
        *corner[0].tolist(),
        *extent[0].tolist(),
        size=[spec.size, spec.size],
        interpolation=InterpolationMode.BICUBIC,
    )
    if params["flip"]:
        view = F.hflip(view)
    if params["jitter"]:
        for turn in params["order"]:
            name = JITTER_OPS[turn]
            if getattr(spec.jitter, name) > 0:  # as torchvision: a hue of 0 would still round twice
                view = _ADJUST[name](view, float(params[name]))
    if params["grey"]:
        view = F.rgb_to_grayscale(view, num_output_channels=3)
    if params["blur"]:
        view = view.filter(ImageFilter.GaussianBlur(float(params["sigma"])))
    if params["solarize"]:
        view = ImageOps.solarize(view)
    return np.asarray(view).reshape(spec.size, spec.size, -1)


def denormalise(view: NDArray[np.float32], spec: ViewsSpec) -> NDArray[np.float64]:
    """A normalised (C, S, S) view back in levels of 0 to 255, (S, S, C)."""
    return 255 * (view.transpose(1, 2, 0).astype(np.float64) * spec.std + spec.mean)
