"""The reference's way to load: torchvision's and PIL's transforms in the processes of torch's DataLoader.

Only to be measured against; written from the paper (arXiv:2103.03230, section 2 and appendix A).
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from dali.spec import ViewsSpec

ENDLESS = 10**9  # images of an epoch that nobody finishes


class Blur:
    """PIL's Gaussian blur with a deviation drawn from a range."""

    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*self.sigma)))


def transform(spec: ViewsSpec, view: int) -> Callable[[Image.Image], Tensor]:
    """One of the two random views, of an RGB image."""
    jitter = spec.jitter
    strengths = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    steps = [
        transforms.RandomResizedCrop(
            spec.size, spec.crop_area, spec.crop_ratio, interpolation=InterpolationMode.BICUBIC
        ),
        transforms.RandomHorizontalFlip(spec.flip),
        transforms.RandomApply([transforms.ColorJitter(*strengths)], p=jitter.prob),
        transforms.RandomGrayscale(spec.grey),
        transforms.RandomApply([Blur(spec.blur_sigma)], p=spec.blur[view]),
        transforms.RandomSolarize(128, p=spec.solarize[view]),
        transforms.ToTensor(),
        transforms.Normalize(spec.mean, spec.std),
    ]
    composed: Callable[[Image.Image], Tensor] = transforms.Compose(steps)
    return composed


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two views of each file, over and over."""

    def __init__(self, files: list[Path], spec: ViewsSpec) -> None:
        self.files = files
        self.transforms = [transform(spec, view) for view in (0, 1)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Image.open(self.files[index % len(self.files)]) as file:
            image = file.convert("RGB")
        y1, y2 = (transform(image) for transform in self.transforms)
        return y1, y2


def batches(files: list[Path], spec: ViewsSpec, batch: int, processes: int, device: torch.device) -> Iterator[Any]:
    """Endless batches (y1, y2) on the device; the processes end when the iterator is closed.

    They are forked from a server without threads: the one that measures has some of DALI and torch, and a process that
    is spawned runs torch's threads into the interpreter's end and may abort there.
    """
    loader = DataLoader(
        TwoViews(files, spec),
        batch_size=batch,
        num_workers=processes,
        pin_memory=device.type == "cuda",
        multiprocessing_context="forkserver",
    )
    for views in loader:
        yield [view.to(device, non_blocking=True) for view in views]
