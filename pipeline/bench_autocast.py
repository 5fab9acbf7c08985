"""Is bf16 faster than float32 for a backbone on this machine? The measurement behind `precision.autocast: auto`."""

import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pipeline.model import Backbone, autocast_dtype, build_backbone


class Timing(NamedTuple):
    """Median and spread (largest - smallest) of the seconds for forward and backward, and what `auto` would choose."""

    backbone: str
    float32: float
    float32_spread: float
    bf16: float
    bf16_spread: float
    auto: str

    @property
    def speedup(self) -> float:
        """How many times faster bf16 was."""
        return self.float32 / self.bf16


def measure_autocast(
    names: Iterable[str], device: str = "cpu", image_size: int = 64, batch: int = 16, repeats: int = 5
) -> list[Timing]:
    """Time forward and backward of each backbone with autocast off and bf16, taken in turns so that drift hits both.

    The first pass of each kind is not counted. Valid only on a machine that does nothing else meanwhile.
    """
    rows = []
    for name in names:
        backbone = build_backbone(name, image_size=image_size).to(device).to(memory_format=torch.channels_last)
        views = torch.rand(batch, 3, image_size, image_size, device=device).contiguous(
            memory_format=torch.channels_last
        )
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(repeats + 1):
            for bf16 in (False, True):
                elapsed = _time_once(backbone, views, bf16)
                if repeat > 0:
                    seconds[bf16].append(elapsed)
        auto = "off" if autocast_dtype("auto", name, device) is None else "bf16"
        rows.append(
            Timing(
                name,
                float32=statistics.median(seconds[False]),
                float32_spread=max(seconds[False]) - min(seconds[False]),
                bf16=statistics.median(seconds[True]),
                bf16_spread=max(seconds[True]) - min(seconds[True]),
                auto=auto,
            )
        )
    return rows


def _time_once(backbone: Backbone, views: torch.Tensor, bf16: bool) -> float:
    device = views.device.type
    backbone.zero_grad()
    _wait(device)
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        features = backbone(views)
    features.float().square().mean().backward()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
