"""What kind of file some bytes are, and why they cannot be decoded."""

import io
import warnings

from PIL import Image

MAGIC = (  # first bytes, or those at an offset
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("WebP", 8, b"WEBP"),
    ("BMP", 0, b"BM"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
    ("JPEG 2000", 0, b"\0\0\0\x0cjP  "),
    ("JPEG 2000", 0, b"\xff\x4f\xff\x51"),
    ("GIF", 0, b"GIF8"),
    ("AVIF or HEIF", 4, b"ftyp"),
    ("PDF", 0, b"%PDF"),
)
READ = ("JPEG", "PNG", "WebP", "BMP", "TIFF", "JPEG 2000", "PNM")
NETPBM = (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")


def format_of(data: bytes) -> str | None:
    """The format that the first bytes show, whatever the file is called; None for none that is known."""
    for name, offset, magic in MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return name
    return "PNM" if data[:2] in NETPBM and data[2:3].isspace() else None


def why_unreadable(data: bytes) -> str:
    """One line on bytes that DALI could not decode: it gives numbers, PIL gives words."""
    if not data:
        return "the file is empty"
    found = format_of(data)
    if found is None:
        return "is no image"
    if found not in READ:
        return f"is {found}, which is not read; convert it to PNG or JPEG"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                image.load()
    except Exception as error:  # PIL's plugins raise whatever they meet in a damaged file
        words = " ".join(str(error).split())
        if "cannot identify" in words:  # it then shows the address of a buffer
            words = "the header is damaged or cut"
        return f"{found}: {words or type(error).__name__}"
    return f"{found} of a sort that DALI does not decode; convert it to PNG or JPEG"


def too_large(height: int, width: int, max_pixels: int) -> str:
    """Why an image was not even decoded."""
    return f"{width} x {height} pixels by its header, more than data.max_pixels={max_pixels}"


def other_length(found: int, listed: int) -> str:
    """Why the list that a run rests on is not true any more."""
    return f"has {found} bytes, had {listed} when it was listed: the images are changing"
