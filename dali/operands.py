"""From a view's draws to the numbers that DALI's operators take: crop window, colour map, blur kernel; NumPy only."""

import numpy as np
from numpy.typing import NDArray

from dali.order import JITTER_OPS
from dali.spec import ViewsSpec

Floats = NDArray[np.float64]

# PIL's and torchvision's weights of grey (ITU-R BT.601).
GREY = np.array([0.299, 0.587, 0.114])
BLUR_PASSES = 3


def changes_colour(spec: ViewsSpec, channels: int) -> bool:
    """Whether any view of this recipe needs the colour map at all."""
    jitter = spec.jitter
    strengths = (jitter.brightness, jitter.contrast, *((jitter.saturation, jitter.hue) if channels == 3 else ()))
    return (jitter.prob > 0 and max(strengths) > 0) or (spec.grey > 0 and channels == 3)


def changes_contrast(spec: ViewsSpec) -> bool:
    """Whether any view needs its image's mean."""
    return spec.jitter.prob > 0 and spec.jitter.contrast > 0


def crop_tries(params: NDArray[np.void]) -> Floats:
    """(n, tries, 2) heights and widths of the windows to try, for an image of area 1."""
    area, ratio = params["area"], params["ratio"]
    return np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=-1)


def crop_windows(
    params: NDArray[np.void], sizes: NDArray[np.int64], spec: ViewsSpec
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(n, 2) corner and (n, 2) extent, rows first, of each image's window, by torchvision's rule.

    The first of the tries that fits counts; if none does, the largest centred window within the range of ratios.
    `views.crop_window` is the same in the graph, for images whose size only decoding tells.
    """
    room = sizes.astype(np.float64)
    tries = np.floor(crop_tries(params) * np.sqrt(room[:, :1] * room[:, 1:])[:, None] + 0.5)
    inside = (tries >= 1) & (tries <= room[:, None])
    fits = inside[..., 0] & inside[..., 1]
    first = np.take_along_axis(tries, fits.argmax(axis=1)[:, None, None], axis=1)[:, 0]
    largest = np.minimum(room, np.floor(room[:, ::-1] * ratio_limits(spec) + 0.5))
    found = fits.any(axis=1, keepdims=True)
    place = np.stack([params["top"], params["left"]], axis=1)
    extent = np.where(found, first, np.maximum(largest, 1))
    corner = np.floor(np.where(found, place * (room - extent + 1), (room - extent) / 2))
    return corner.astype(np.int32), extent.astype(np.int32)


def ratio_limits(spec: ViewsSpec) -> Floats:
    """(2,): the most height a unit of width may have, the most width a unit of height may have."""
    return np.array([1 / spec.crop_ratio[0], spec.crop_ratio[1]])


def view_sizes(params: NDArray[np.void], spec: ViewsSpec) -> NDArray[np.float32]:
    """(n, 2) size of the view for the resize; a negative width mirrors."""
    return np.stack([np.full(len(params), spec.size), np.where(params["flip"], -spec.size, spec.size)], axis=1).astype(
        np.float32
    )


def colour_maps(params: NDArray[np.void], channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Jitter in its order, then grey, as one linear map: (n, C, C) M and K, so that a pixel p becomes M p + K mean.

    `mean` is the mean pixel of the cropped and resized image: contrast pivots on the grey mean of what the operators
    before it make of the image, which is linear in `mean`. What differs from torchvision: nothing is rounded or clipped
    between the operators, and hue is a rotation about the grey axis, not torchvision's shift in HSV.
    """
    grey = GREY if channels == 3 else np.ones(1)
    towards_grey = np.ones((channels, 1)) * grey  # (C, C): every channel becomes the grey value
    identity = np.eye(channels)
    factors = {
        name: np.where(params["jitter"], params[name], neutral)[:, None, None]
        for name, neutral in zip(JITTER_OPS, (1, 1, 1, 0), strict=True)
    }
    saturation = factors["saturation"]
    on_pixel = {
        "brightness": factors["brightness"] * identity,
        "contrast": factors["contrast"] * identity,
        "saturation": saturation * identity + (1 - saturation) * towards_grey,
        "hue": _rotation(factors["hue"], channels),
    }
    m = np.broadcast_to(identity, (len(params), channels, channels))
    k = np.zeros_like(m)
    for turn in range(len(JITTER_OPS)):
        chosen = params["order"][:, turn]
        step = np.choose(chosen[:, None, None], [on_pixel[name] for name in JITTER_OPS])
        pivots = (chosen == JITTER_OPS.index("contrast"))[:, None, None]
        pivot = np.where(pivots, (1 - factors["contrast"]) * (towards_grey @ (m + k)), 0)
        m, k = step @ m, step @ k + pivot
    to_grey = params["grey"][:, None, None]
    m, k = np.where(to_grey, towards_grey @ m, m), np.where(to_grey, towards_grey @ k, k)
    return m.astype(np.float32), k.astype(np.float32)


def _rotation(turns: Floats, channels: int) -> Floats:
    """(n, C, C) rotation about the grey axis (1, 1, 1), by (n, 1, 1) turns.

    On photographs about half as far from the shift of hue in HSV as the rotation in YIQ, which keeps the grey value
    instead: 3.9 against 7.1 levels on average on one, 10 against 12 to 21 on a saturated one, at 0.1 turns.
    """
    if channels == 1:
        return np.ones_like(turns)
    sine, cosine = np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)
    axis = np.full((3, 3), 1 / 3)
    across = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)
    return axis + cosine * (np.eye(3) - axis) + sine * across


def blur_kernels(params: NDArray[np.void]) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """The column (k, 1) and the row (1, k) of each view's blur; k = 1 where it is not blurred.

    PIL's GaussianBlur is not a Gaussian but three passes of a box with fractional ends; this is their product, so that
    only PIL's rounding between the passes remains. Source: Gwosdek et al., "Theoretical foundations of Gaussian
    convolution by extended box filtering" (2011), as in PIL.
    """
    variance = params["sigma"] ** 2 / BLUR_PASSES
    whole = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    radius = whole + part
    reach = int(whole.max(initial=0)) + 1
    places = np.arange(-reach, reach + 1)
    box = np.clip(radius[:, None] + 1 - np.abs(places), 0, 1) / (2 * radius[:, None] + 1)
    columns, rows = [], []
    for weights, ends, blurred in zip(box, whole.astype(int) + 1, params["blur"], strict=True):
        kernel = np.ones(1)
        if blurred:
            once = weights[reach - ends : reach + ends + 1]
            kernel = np.convolve(np.convolve(once, once), once)
        column = kernel.astype(np.float32)[:, None]
        columns.append(column)
        rows.append(column.T)
    return columns, rows


def solarize_masks(params: NDArray[np.void]) -> NDArray[np.uint8]:
    """(n,): 255 where the view is solarized, else 0. min(p, p ^ mask) inverts the levels p >= 128, as PIL does."""
    return np.where(params["solarize"], 255, 0).astype(np.uint8)
