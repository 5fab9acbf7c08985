"""The same view by torchvision and PIL, from the same draws: what the DALI graph is compared with."""

import io
import warnings
from typing import Any

import numpy as np
import torchvision.transforms.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode

from dali.errors import InputError
from dali.interface import Source
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
    corner, extent = crop_windows(params[None], np.array([image.shape[:2]]), spec)
    view = F.resized_crop(
        as_picture(image),
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
    return as_pixels(view)


def reference_centre(image: NDArray[np.uint8], spec: ViewsSpec) -> NDArray[np.uint8]:
    """The evaluation view of an (H, W, C) image: (S, S, C) bytes, before normalisation."""
    short = F.resize(as_picture(image), round(spec.size / spec.test_crop), InterpolationMode.BICUBIC)
    return as_pixels(F.center_crop(short, spec.size))


def original(source: Source, index: int, channels: int) -> NDArray[np.uint8]:
    """An image as it is before any view, in host memory: (H, W, C), upright.

    Files are decoded by PIL, and converted as docs/data.md says: alpha is dropped, of 16 bits the high byte counts.

    Raises:
        InputError: PIL cannot read it, whatever DALI can.
    """
    try:
        data = source.read(index)
        return _decoded(data.tobytes(), channels) if source.encoded else in_channels(as_picture(data), channels)
    except Exception as error:  # PIL's plugins raise whatever they meet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source.name(index)!r}: PIL cannot read it ({reason}); convert it to PNG or JPEG") from None


def _decoded(data: bytes, channels: int) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images, odd metadata, and alpha that is dropped
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if picture.mode.startswith("I"):
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        if picture.mode == "F":
            picture = Image.fromarray(np.rint(255 * np.asarray(picture).clip(0, 1)).astype(np.uint8))
        return in_channels(picture, channels)


def in_channels(picture: Image.Image, channels: int) -> NDArray[np.uint8]:
    """(H, W, C) of any picture."""
    return as_pixels(picture.convert("RGB" if channels == 3 else "L"))


def as_picture(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def as_pixels(picture: Image.Image) -> NDArray[np.uint8]:
    pixels = np.asarray(picture)
    return pixels.reshape(*pixels.shape[:2], -1)


def normalise(view: NDArray[Any], spec: ViewsSpec) -> NDArray[np.float32]:
    """(S, S, C) levels as a loader gives them: (C, S, S)."""
    pixels = (view.astype(np.float64) / 255 - spec.mean) / spec.std
    return pixels.transpose(2, 0, 1).astype(np.float32)


def denormalise(view: NDArray[np.float32], spec: ViewsSpec) -> NDArray[np.float64]:
    """A normalised (C, S, S) view back in levels of 0 to 255, (S, S, C)."""
    return 255 * (view.transpose(1, 2, 0).astype(np.float64) * spec.std + spec.mean)
