"""Real and made images for tests."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_image


def photo(name: str, width: int = 250, height: int = 167) -> NDArray[np.uint8]:
    """One of scikit-learn's two photographs (china, flower), (height, width, 3)."""
    return np.asarray(Image.fromarray(load_sample_image(f"{name}.jpg")).resize((width, height)))


def crops(count: int, size: int = 40, channels: int = 3) -> list[NDArray[np.uint8]]:
    """Different pieces of the photographs, of unlike sizes from `size` on."""
    pieces = []
    for number in range(count):
        whole = photo(("china", "flower")[number % 2])
        top, left = 7 * number % 100, 11 * number % 150
        piece = whole[top : top + size + number % 5, left : left + size + number % 7]
        pieces.append(np.ascontiguousarray(piece[..., :channels]))
    return pieces


def write_images(folder: Path, names: list[str], size: int = 12) -> None:
    """A small, different image file of each name, in the format of its suffix."""
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}[file.suffix.lower()]
        Image.new("RGB", (size, size), (9 * number % 256, 50, 100)).save(file, kind)
