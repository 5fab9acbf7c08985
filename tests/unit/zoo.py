"""Image files of every sort that people have, good and broken, made from one photograph."""

import io
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from images import photo
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT = 48, 32
ROTATED = 6  # EXIF: the picture is upright after a quarter turn


@cache
def picture() -> Image.Image:
    """The photograph that all of them show."""
    return Image.fromarray(photo("china", WIDTH, HEIGHT))


def sixteen_bits() -> NDArray[np.uint16]:
    """Grey of 16 bits whose high bytes are the picture's."""
    return np.asarray(picture().convert("L")).astype(np.uint16) * 256 + 77


@cache
def good() -> dict[str, tuple[bytes, NDArray[np.uint8]]]:
    """Files by name, each with the RGB pixels it stands for: what PIL shows, upright, without alpha."""
    rgb, grey = picture(), picture().convert("L")
    palette, alpha = rgb.quantize(16), rgb.copy()
    alpha.putalpha(Image.linear_gradient("L").resize((WIDTH, HEIGHT)))
    turned = {"exif": _exif()}
    files = {
        "jpeg.jpg": _saved(rgb, "JPEG", quality=95),
        "progressive.jpg": _saved(rgb, "JPEG", quality=95, progressive=True),
        "grey.jpg": _saved(grey, "JPEG", quality=95),
        "cmyk.jpg": _saved(rgb.convert("CMYK"), "JPEG", quality=95),
        "rotated.jpg": _saved(rgb, "JPEG", quality=95, **turned),
        "rgb.png": _saved(rgb, "PNG"),
        "grey.png": _saved(grey, "PNG"),
        "palette.png": _saved(palette, "PNG"),
        "palette_transparent.png": _saved(palette, "PNG", transparency=3),
        "alpha.png": _saved(alpha, "PNG"),
        "grey_alpha.png": _saved(alpha.convert("LA"), "PNG"),
        "one_bit.png": _saved(grey.convert("1"), "PNG"),
        "rgb16.png": _png_of_16_bits(np.asarray(rgb).astype(np.uint16) * 257),
        "rotated.png": _saved(rgb, "PNG", **turned),
        "lossy.webp": _saved(rgb, "WEBP", quality=95),
        "lossless.webp": _saved(rgb, "WEBP", lossless=True),
        "alpha.webp": _saved(alpha, "WEBP", lossless=True, exact=True),
        "animated.webp": _saved(rgb, "WEBP", lossless=True, save_all=True, append_images=[rgb.rotate(180)]),
        "rotated.webp": _webp_with_exif(odd=False),
        "rgb.bmp": _saved(rgb, "BMP"),
        "palette.bmp": _saved(palette, "BMP"),
        "grey.bmp": _saved(grey, "BMP"),
        "rgb.tif": _saved(rgb, "TIFF"),
        "lzw.tif": _saved(rgb, "TIFF", compression="tiff_lzw"),
        "grey.tif": _saved(grey, "TIFF"),
        "alpha.tif": _saved(alpha, "TIFF"),
        "cmyk.tif": _saved(rgb.convert("CMYK"), "TIFF"),
        "pages.tif": _saved(rgb, "TIFF", save_all=True, append_images=[rgb.rotate(180)]),
        "rotated.tif": _saved(rgb, "TIFF", tiffinfo={274: ROTATED}),
        "rgb.ppm": _saved(rgb, "PPM"),
        "grey.pgm": _saved(grey, "PPM"),
        "rgb.jp2": _saved(rgb, "JPEG2000"),
        "png_called.jpg": _saved(rgb, "PNG"),
    }
    shown = {name: (content, _as_pil_shows(content)) for name, content in files.items()}
    # PIL clips 16 bits of grey to 255; what is meant is the high byte.
    high = np.repeat((sixteen_bits() >> 8).astype(np.uint8)[..., None], 3, axis=2)
    for name, kind in (("grey16.png", "PNG"), ("grey16.tif", "TIFF")):
        shown[name] = (_saved(Image.fromarray(sixteen_bits()), kind), high)
    return shown


@cache
def bad() -> dict[str, tuple[bytes, str]]:
    """Files by name that cannot be decoded, each with words that its reason holds."""
    jpeg, png = _saved(picture(), "JPEG", quality=95), _saved(picture(), "PNG")
    damaged = bytearray(png)
    damaged[len(png) // 2] ^= 0xFF
    return {
        "text.jpg": (b"this is text, and no image\n" * 9, "is no image"),
        "empty.jpg": (b"", "empty"),
        "cut_at_60_per_cent.jpg": (jpeg[: len(jpeg) * 6 // 10], "truncated"),
        "first_60_bytes.jpg": (jpeg[:60], "JPEG"),
        "cut_in_half.png": (png[: len(png) // 2], "truncated"),
        "damaged.png": (bytes(damaged), "PNG"),
        "gif_called.jpg": (_saved(picture().quantize(16), "GIF"), "is GIF, which is not read"),
        "odd_with_exif.webp": (_webp_with_exif(odd=True), "WebP of a sort that DALI does not decode"),
        "cut.webp": ((whole := _saved(picture(), "WEBP"))[: len(whole) * 6 // 10], "WebP"),
        "cut.bmp": (_saved(picture(), "BMP")[:2000], "truncated"),
        "cut.tif": (_saved(picture(), "TIFF")[:2000], "TIFF"),
    }


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Each file of the dictionary, below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _saved(image: Image.Image, kind: str, **how: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


def _exif() -> bytes:
    exif = Image.Exif()
    exif[0x112] = ROTATED
    return exif.tobytes()


def _webp_with_exif(odd: bool) -> bytes:
    """DALI 2.4 forgets the byte that fills up a chunk of odd length, and then does not find the EXIF behind it."""
    for quality in range(100):
        content = _saved(picture(), "WEBP", lossless=True, quality=quality, exif=_exif())
        if int.from_bytes(content[34:38], "little") % 2 == odd:
            return content
    raise AssertionError("all of one parity")


def _as_pil_shows(content: bytes) -> NDArray[np.uint8]:
    from PIL import ImageOps

    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def _png_of_16_bits(pixels: NDArray[np.uint16]) -> bytes:
    """RGB of 16 bits, which PIL does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
