"""Real images that scikit-learn brings along, written as files: for the quickstart, and to measure with."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits, load_sample_image, load_sample_images

NUM_TEST = 597


def write_digits(folder: Path) -> None:
    """The digits as FOLDER/train|test/CLASS/NUMBER.png, 8x8 grey, once. The last third, by other writers, tests."""
    if (folder / "complete").is_file():
        return
    digits = load_digits()
    first_test = len(digits.images) - NUM_TEST
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        target = folder / ("train" if number < first_test else "test") / str(label) / f"{number:04d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(target)
    (folder / "complete").write_text("")


def write_photographs(folder: Path, count: int, width: int, height: int, seed: int = 0) -> None:
    """`count` JPEG cuts of scikit-learn's two photographs as FOLDER/CLASS/NUMBER.jpg, at varied places and scales."""
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    draws = np.random.default_rng(seed).random((count, 3))
    for number, (scale, x, y) in enumerate(draws):
        photograph = photographs[number % 2]
        fit = min(photograph.width / width, photograph.height / height)
        w, h = (round(side * fit * (0.5 + 0.5 * scale)) for side in (width, height))
        left, top = round(x * (photograph.width - w)), round(y * (photograph.height - h))
        cut = photograph.resize((width, height), Image.Resampling.BICUBIC, (left, top, left + w, top + h))
        target = folder / ("temple", "flower")[number % 2] / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        cut.save(target, quality=90)


def photographs_to_compare() -> dict[str, Image.Image]:
    """Both photographs, and what is made of them to be hard on colour operators, by name."""
    china, flower = (Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower"))
    return {
        "china": china,
        "flower": flower,
        "dark": Image.fromarray(with_mean(np.asarray(china), 31)),
        "bright": Image.fromarray(with_mean(np.asarray(china), 220)),
        "saturated": ImageEnhance.Color(flower).enhance(2.5),
    }


def with_mean(image: NDArray[np.uint8], mean: float) -> NDArray[np.uint8]:
    """The image made darker or brighter by a power law until its pixels' mean is `mean`."""
    low, high = 0.05, 20.0
    for _ in range(40):
        power = (low * high) ** 0.5
        changed = 255 * (image / 255) ** power
        low, high = (power, high) if changed.mean() > mean else (low, power)
    return np.round(changed).astype(np.uint8)
