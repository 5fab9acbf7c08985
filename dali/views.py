"""The view recipe as a DALI graph: crop, resize, blur, colour, solarize, normalise; the same on CPU and GPU.

Pixels stay levels of bytes between the operators, as in PIL. Order differs from the reference's in one place: the blur
comes before the colour map, with which it commutes but for clipping, so that the map can end in bytes. On the CPU some
steps are not DALI's operators but those of `pixels`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as dmath
import nvidia.dali.types as types
from numpy.typing import NDArray

from dali.operands import (
    blur_kernels,
    changes_colour,
    changes_contrast,
    colour_maps,
    crop_tries,
    crop_windows,
    ratio_limits,
    solarize_masks,
    view_sizes,
)
from dali.order import CROP_TRIES
from dali.pixels import Threads, finish, resize
from dali.spec import ViewsSpec

Node = Any  # a DALI DataNode: its package has no types

# On the CPU, from this size on, some steps are those of `pixels`; below it a call takes longer than its pixels.
LARGE = 64


def resizes_as_pil(spec: ViewsSpec) -> bool:
    """Whether a CPU's resize is `pixels.resize`, in bytes and cut off at the edge as PIL's; else it is DALI's."""
    return spec.antialias and spec.size >= LARGE


def view_operands(
    params: NDArray[np.void], view: int, spec: ViewsSpec, channels: int, sizes: NDArray[np.int64] | None
) -> dict[str, Any]:
    """What `random_view` is fed for a batch, by name; only what this recipe needs, as each operator costs time.

    `sizes` are the images' (n, 2) heights and widths, None where the graph has to look at the decoded images. The names
    depend on everything but the number of samples.
    """
    operands: dict[str, Any] = {"size": view_sizes(params, spec)}
    if sizes is None:
        operands["tries"] = crop_tries(params)
        operands["place"] = np.stack([params["top"], params["left"]], axis=1)
    else:
        operands["corner"], operands["extent"] = crop_windows(params, sizes, spec)
    if spec.blur[view] > 0:
        operands["column"], operands["row"] = blur_kernels(params)
    if changes_colour(spec, channels):
        operands["colour"], pivot = colour_maps(params, channels)
        if changes_contrast(spec):
            operands["pivot"] = pivot
    if spec.solarize[view] > 0:
        operands["solarize"] = solarize_masks(params)
    return operands


def random_view(images: Node, fed: Mapping[str, Node], spec: ViewsSpec, layout: str, threads: Threads) -> Node:
    """One view of each image (uint8, HWC): float32, (C, S, S) or (S, S, C) by `layout`, normalised."""
    if "corner" in fed:
        window = fed["corner"], fed["extent"]
    else:
        window = crop_window(images.shape(), fed["tries"], fed["place"], spec)
    pixels = _resize(images, fed["size"], window, spec, threads)
    if "column" in fed:
        # Kernels stay on the CPU on both devices: their sizes plan the launch.
        pixels = fn.filter(pixels, fed["column"], border="clamp")
        pixels = fn.filter(pixels, fed["row"], border="clamp")
    if pixels.device == "cpu" and spec.size >= LARGE:
        return _finish(pixels, fed, spec, layout, threads)
    if "colour" in fed:
        pixels = _map_colour(pixels, fed)
    if "solarize" in fed:
        mask = fed["solarize"].gpu() if pixels.device == "gpu" else fed["solarize"]
        pixels = dmath.min(pixels, pixels ^ mask)
    return normalise(pixels, spec, layout)


def normalise(pixels: Node, spec: ViewsSpec, layout: str) -> Node:
    """Bytes to float32 with the recipe's mean and deviation."""
    mean, std = [255 * value for value in spec.mean], [255 * value for value in spec.std]
    return fn.crop_mirror_normalize(pixels, mean=mean, std=std, dtype=types.FLOAT, output_layout=layout)


def _resize(images: Node, size: Node, window: tuple[Node, ...], spec: ViewsSpec, threads: Threads) -> Node:
    """A window (corner, extent) of each image, or with () the whole of it, at a size; a negative width mirrors."""
    if images.device == "cpu" and resizes_as_pil(spec):
        return _call(threads.each(resize), images, size, *window, layout="HWC")
    if window:  # not `resize(roi_start=...)`, which reads pixels outside the window
        images = fn.slice(images, *window, axes=[0, 1])
    return fn.resize(images, size=size, interp_type=types.INTERP_CUBIC, antialias=spec.antialias)


def _finish(pixels: Node, fed: Mapping[str, Node], spec: ViewsSpec, layout: str, threads: Threads) -> Node:
    names = [name for name in ("colour", "pivot", "solarize") if name in fed]

    def step(sample: Any, *values: Any) -> Any:
        return finish(sample, dict(zip(names, values, strict=True)), spec, layout)

    return _call(threads.each(step), pixels, *(fed[name] for name in names), layout=layout)


def _call(function: Callable[..., list[Any]], *inputs: Node, layout: str) -> Node:
    return fn.python_function(*inputs, function=function, batch_processing=True, output_layouts=layout)


def _map_colour(pixels: Node, fed: Mapping[str, Node]) -> Node:
    """M p + K mean (see `operands.colour_maps`), as bytes, rounded and clipped."""
    if "pivot" not in fed:
        return fn.coord_transform(pixels, M=fed["colour"], dtype=types.UINT8)
    mean = fn.reductions.mean(pixels, axes=[0, 1], keep_dims=True)
    offset = fn.squeeze(fn.coord_transform(mean, M=fed["pivot"]), axes=[0, 1])
    if pixels.device == "cpu":
        return fn.coord_transform(pixels, M=fed["colour"], T=offset, dtype=types.UINT8)
    # The offset is on the device, where arguments of operators cannot be.
    return fn.cast(fn.coord_transform(pixels, M=fed["colour"]) + offset, dtype=types.UINT8)


def crop_window(shape: Node, tries: Node, place: Node, spec: ViewsSpec) -> tuple[Node, Node]:
    """`operands.crop_windows` in the graph, bit for bit: corner and extent, (2,) int32, of one image's window.

    Float64 as there, but where it reduces: DALI does that in int32 at most exactly.
    """
    height, width = (fn.cast(shape[axis], dtype=types.FLOAT64) for axis in (0, 1))
    room = fn.stack(height, width)
    tallest, widest = (float(limit) for limit in ratio_limits(spec))
    windows = dmath.floor(tries * dmath.sqrt(height * width) + 0.5)
    inside = fn.cast((windows >= 1.0) & (windows <= room), dtype=types.INT32)
    # The first that fits ranks highest; 0 where none does.
    rank = fn.reductions.min(inside, axes=[1]) * np.arange(CROP_TRIES, 0, -1, dtype=np.int32)
    best = fn.reductions.max(rank)
    chosen = fn.cast((rank == best) & (rank > 0), dtype=types.INT32)
    first = fn.reductions.sum(fn.cast(windows, dtype=types.INT32) * fn.expand_dims(chosen, axes=[1]), axes=[0])
    found = fn.cast(best > 0, dtype=types.FLOAT64)
    largest = dmath.min(room, dmath.floor(fn.stack(width * tallest, height * widest) + 0.5))
    extent = first + (1.0 - found) * dmath.max(largest, 1.0)
    spare = room - extent
    corner = dmath.floor(found * place * (spare + 1.0) + (1.0 - found) * (spare / 2.0))
    return fn.cast(corner, dtype=types.INT32), fn.cast(extent, dtype=types.INT32)


def centre_view(images: Node, spec: ViewsSpec, layout: str, threads: Threads) -> Node:
    """The evaluation view: short side to size / test_crop (bicubic), centre cut out, normalised."""
    shape = images.shape()
    height, width = shape[0], shape[1]
    short = round(spec.size / spec.test_crop)
    # Whole numbers: the short side must come out exact. The long one is cut down, as torchvision does.
    size = fn.stack(height, width) * short // dmath.min(height, width)
    pixels = _resize(images, fn.cast(size, dtype=types.FLOAT), (), spec, threads)
    spare = size - spec.size
    half = spare // 2
    corner = half + (spare & half & 1)  # Python's round of spare / 2, which goes to the even neighbour
    pixels = fn.slice(pixels, fn.cast(corner, dtype=types.INT32), [spec.size, spec.size], axes=[0, 1])
    return normalise(pixels, spec, layout)
