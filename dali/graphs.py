"""Whole DALI graphs: what goes in for a batch, and the views that come out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali.pipeline import Pipeline

from dali.order import VIEW_PARAMS
from dali.sources import Source
from dali.spec import ViewsSpec
from dali.views import Node, centre_view, random_view, view_operands

Batch = tuple[Any, ...]  # one array (n, ...) or list of n arrays for each input of a graph


def random_views(
    source: Source, spec: ViewsSpec, channels: int, layout: str, feed: Callable[[], Batch], count: int, **how: Any
) -> Pipeline:
    """The first `count` (1 or 2) random views of each image.

    `feed` gives a batch: of `Source.feed`, then each view's `view_operands`, in order; it raises StopIteration at the
    end. `how` goes to `_pipeline`.
    """
    none = np.zeros(0, np.int64)
    params = np.zeros(0, VIEW_PARAMS)
    names = [list(view_operands(params, view, spec, channels, source.sizes(none))) for view in range(count)]

    def build(data: Node, *fed: Node) -> list[Node]:
        images, nodes = _decode(data, source, channels, how["device_id"]), iter(fed)
        return [random_view(images, {key: next(nodes) for key in keys}, spec, layout) for keys in names]

    return _pipeline(build, feed, 1 + sum(map(len, names)), source, **how)


def labelled_eval(
    source: Source, spec: ViewsSpec, channels: int, layout: str, feed: Callable[[], Batch], **how: Any
) -> Pipeline:
    """The centre of each image, without any draw. `feed` gives a batch of `Source.feed` alone."""

    def build(data: Node) -> list[Node]:
        return [centre_view(_decode(data, source, channels, how["device_id"]), spec, layout)]

    return _pipeline(build, feed, 1, source, **how)


def _decode(data: Node, source: Source, channels: int, device_id: int | None) -> Node:
    """(H, W, C) bytes with the wanted channels, on the pipeline's device."""
    colour = {1: types.GRAY, 3: types.RGB}
    if source.encoded:
        files = fn.io.file.read(data)
        if device_id is None:
            return fn.decoders.image(files, output_type=colour[channels])
        # Upsample colour as the CPU decoder does, so that both devices see the same pixels.
        return fn.decoders.image(files, device="mixed", output_type=colour[channels], jpeg_fancy_upsampling=True)
    images = data if device_id is None else data.gpu()
    if source.channels == channels:
        return images
    return fn.color_space_conversion(images, image_type=colour[source.channels], output_type=colour[channels])


def _pipeline(
    build: Callable[..., list[Node]],
    feed: Callable[[], Batch],
    num_inputs: int,
    source: Source,
    *,
    batch: int,
    threads: int,
    device_id: int | None,
    prefetch: int,
) -> Pipeline:
    """`batch`: the most samples in one; `device_id`: a GPU, or None for the CPU; `prefetch`: batches in the making."""
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=device_id, prefetch_queue_depth=prefetch)
    with pipeline:
        layouts = ["" if source.encoded else "HWC"]
        inputs = fn.external_source(feed, num_outputs=num_inputs, batch=True, layout=layouts)
        pipeline.set_outputs(*build(*inputs))
    pipeline.build()
    return pipeline
