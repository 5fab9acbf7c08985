"""Steps of a view on the CPU that DALI's own operators take several times as long for: torch and NumPy, in the graph.

docs/loader.md has the figures. Each step takes one sample and depends on nothing else, so views are the same bits for
any batch and number of threads; torch's resize of bytes and NumPy's arithmetic start no threads of their own.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dali.spec import ViewsSpec

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Threads(ThreadPoolExecutor):
    """`count` threads, of which the one that calls is the first."""

    def __init__(self, count: int) -> None:
        super().__init__(max(1, count - 1), thread_name_prefix="dali")
        self.count, self._begun = count, False

    def each(self, step: Callable[..., Any]) -> Callable[..., list[Any]]:
        """A step of one sample, made one of a batch: lists in, a list out. Called before the graph runs."""
        if not self._begun:
            self._begin()

        def step_of_batch(*inputs: Sequence[Any]) -> list[Any]:
            done: list[Any] = [None] * len(inputs[0])
            rows = iter(range(len(done)))  # shared: whoever is free takes the next

            def work() -> None:
                for row in rows:
                    done[row] = step(*(values[row] for values in inputs))

            others = [self.submit(work) for _ in range(min(self.count, len(done)) - 1)]
            work()
            for other in others:
                other.result()
            return done

        return step_of_batch

    def _begin(self) -> None:
        """Start all threads at once: one started from a thread of DALI's would leave a trace of that in `threading`."""
        self._begun = True
        together = threading.Barrier(max(1, self.count - 1))
        for _ in range(self.count - 1):
            self.submit(together.wait)


def resize(
    image: Pixels, size: NDArray[Any], corner: NDArray[np.int32] | None = None, extent: NDArray[np.int32] | None = None
) -> Pixels:
    """An image, or a window of it, at `size` (height, width; a negative width mirrors): bicubic, antialiased, as PIL's.

    torch's kernel for bytes is PIL's, with weights of 16 bits; rows first, as in all Pillows before 13.
    """
    if corner is not None and extent is not None:
        (top, left), (bottom, right) = corner, corner + extent
        image = image[top:bottom, left:right]
    height, width = (int(side) for side in size)
    planes = torch.from_numpy(image).permute(2, 0, 1)[None]
    planes = torch.nn.functional.interpolate(planes, size=(height, abs(width)), mode="bicubic", antialias=True)
    resized: Pixels = planes[0].permute(1, 2, 0).numpy()
    return np.ascontiguousarray(resized[:, ::-1] if width < 0 else resized)


def finish(pixels: Pixels, given: dict[str, NDArray[Any]], spec: ViewsSpec, layout: str) -> Floats:
    """Colour map, solarize, normalise: what `views.random_view` does after the blur, by the same operands."""
    planes = [pixels[..., channel].astype(np.float32) for channel in range(pixels.shape[2])]
    if "colour" in given:
        offsets = np.zeros(len(planes), np.float32)
        if "pivot" in given:
            offsets = given["pivot"] @ np.array([plane.mean() for plane in planes])
        planes = [_mixed(planes, row, offset) for row, offset in zip(given["colour"], offsets, strict=True)]
    view = np.empty(
        (*pixels.shape[:2], len(planes)) if layout == "HWC" else (len(planes), *pixels.shape[:2]), np.float32
    )
    solarized = "solarize" in given and given["solarize"] > 0
    for channel, plane in enumerate(planes):
        if solarized:
            np.minimum(plane, 255 - plane, out=plane)
        plane -= np.float32(255 * spec.mean[channel])
        target = view[..., channel] if layout == "HWC" else view[channel]
        np.multiply(plane, np.float32(1 / (255 * spec.std[channel])), out=target)
    return view


def _mixed(planes: Sequence[Floats], weights: Floats, offset: np.floating[Any]) -> Floats:
    """The planes' weighted sum and an offset, rounded and clipped to levels of bytes."""
    mixed = planes[0] * weights[0]
    part = np.empty_like(mixed)
    for plane, weight in zip(planes[1:], weights[1:], strict=True):
        mixed += np.multiply(plane, weight, out=part)
    mixed += np.float32(offset)
    np.rint(mixed, out=mixed)
    return np.clip(mixed, 0, 255, out=mixed)
