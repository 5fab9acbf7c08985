"""Whole DALI graphs: what goes in for a batch, and the views that come out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import pipeline_def
from nvidia.dali.pipeline import Pipeline, do_not_convert

from dali.interface import Source
from dali.order import VIEW_PARAMS
from dali.pixels import Threads
from dali.spec import DecoderSpec, ViewsSpec
from dali.views import Node, centre_view, random_view, view_operands

Batch = tuple[Any, ...]  # one array (n, ...) or list of n arrays for each input of a graph


def random_views(
    source: Source,
    spec: ViewsSpec,
    channels: int,
    layout: str,
    feed: Callable[[], Batch],
    count: int,
    *,
    threads: Threads,
    **how: Any,
) -> Pipeline:
    """The first `count` (1 or 2) random views of each image, and `_decode`'s facts.

    `feed` gives a batch: of `Source.feed`, then each view's `view_operands`, in order; it raises StopIteration at the
    end. `how` goes to `_pipeline`.
    """
    none = np.zeros(0, np.int64)
    params = np.zeros(0, VIEW_PARAMS)
    names = [list(view_operands(params, view, spec, channels, source.sizes(none))) for view in range(count)]

    def build(images: Node, *fed: Node) -> list[Node]:
        nodes = iter(fed)
        return [random_view(images, {key: next(nodes) for key in keys}, spec, layout, threads) for keys in names]

    return _pipeline(build, feed, 1 + sum(map(len, names)), source, channels, threads=threads, **how)


def labelled_eval(
    source: Source,
    spec: ViewsSpec,
    channels: int,
    layout: str,
    feed: Callable[[], Batch],
    *,
    threads: Threads,
    **how: Any,
) -> Pipeline:
    """The centre of each image, without any draw, and `_decode`'s facts. `feed` gives `Source.feed`'s batches alone."""

    def build(images: Node) -> list[Node]:
        return [centre_view(images, spec, layout, threads)]

    return _pipeline(build, feed, 1, source, channels, threads=threads, **how)


def decoded(source: Source, channels: int, feed: Callable[[], Batch], **how: Any) -> Pipeline:
    """Only whether images decode: their shapes, and `_decode`'s facts. `feed` gives `Source.feed`'s batches alone."""

    def build(images: Node) -> list[Node]:
        return [images.shape()]

    return _pipeline(build, feed, 1, source, channels, **how)


def _decode(
    data: Node, source: Source, channels: int, device_id: int | None, decoder: DecoderSpec
) -> tuple[Node, list[Node]]:
    """(H, W, C) bytes with the wanted channels, on the pipeline's device.

    And of encoded images what their bytes and headers say, on the CPU: length (1,) and height, width, channels (3,). An
    image of more than `source.max_pixels` is not decoded, but one black pixel.
    """
    colour = {1: types.GRAY, 3: types.RGB}
    if source.encoded:
        files = fn.io.file.read(data) if source.in_files else data
        shape = fn.peek_image_shape(files)
        images = _decode_within(files, shape, source.max_pixels, channels, colour[channels], device_id, decoder)
        return images, [files.shape(), shape]
    images = data if device_id is None else data.gpu()
    if source.channels != channels:
        images = fn.color_space_conversion(images, image_type=colour[source.channels], output_type=colour[channels])
    return images, []


def _decode_within(
    files: Node,
    shape: Node,
    max_pixels: int,
    channels: int,
    colour: types.DALIImageType,
    device_id: int | None,
    decoder: DecoderSpec,
) -> Node:
    if shape[0] * shape[1] <= max_pixels:
        if device_id is None:
            images = fn.decoders.image(files, output_type=colour)
        else:
            # Upsample colour as the CPU decoder does, so that both devices see the same pixels.
            how: dict[str, Any] = {"jpeg_fancy_upsampling": True, **decoder.arguments()}
            images = fn.decoders.image(files, device="mixed", output_type=colour, **how)
    else:
        pixel = np.zeros((1, 1, channels), np.uint8)
        images = types.Constant(pixel, layout="HWC", device="cpu" if device_id is None else "gpu")
    return images


def _pipeline(
    build: Callable[..., list[Node]],
    feed: Callable[[], Batch],
    num_inputs: int,
    source: Source,
    channels: int,
    *,
    batch: int,
    threads: Threads,
    device_id: int | None,
    prefetch: int,
    decoder: DecoderSpec,
) -> Pipeline:
    """`batch`: the most samples in one; `device_id`: a GPU, or None for the CPU; `prefetch`: batches in the making.

    `decoder` counts on a GPU alone.
    """
    # The `if`s of views are Python's, decided here; that of `_decode_within` is the graph's own.
    views = do_not_convert(build)

    @pipeline_def(enable_conditionals=source.encoded)
    def graph() -> tuple[Node, ...]:
        layouts = ["" if source.encoded else "HWC"]
        inputs = fn.external_source(feed, num_outputs=num_inputs, batch=True, layout=layouts)
        images, facts = _decode(inputs[0], source, channels, device_id, decoder)
        return (*views(images, *inputs[1:]), *facts)

    pipeline = graph(batch_size=batch, num_threads=threads.count, device_id=device_id, prefetch_queue_depth=prefetch)
    pipeline.build()
    return pipeline
