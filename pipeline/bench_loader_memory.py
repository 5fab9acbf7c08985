"""Whether loading for long holds more and more: resident memory and open files, epoch by epoch."""

import ctypes
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from dali.folders import FolderSource
from dali.loader import EvalLoader, TwoViewLoader
from dali.order import Shard, steps_per_epoch
from dali.spec import ViewsSpec
from pipeline.samples import write_photographs

WARM_UP = 10  # epochs, until buffers have their largest size: after some 100 steps here
BOUND = 0.001  # growth an epoch, as a share of what is resident


class Epoch(NamedTuple):
    """At the end of an epoch: bytes resident, files open, threads."""

    resident: int
    files: int
    threads: int


def measure(
    device: torch.device, threads: int, epochs: int, images: int, batch: int, size: int, width: int, height: int
) -> Iterator[Epoch]:
    """One row an epoch after the warm-up: of training views by one loader, and of evaluation by a new one each time."""
    alone, process = Shard(0, 1), psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images, width, height)
        source, spec = FolderSource(folder), ViewsSpec(size=size)
        steps = steps_per_epoch(images, batch)
        how: dict[str, Any] = {"channels": 3, "device": str(device), "threads": threads}
        with TwoViewLoader(source, spec, seed=0, global_batch=batch, shard=alone, **how) as training:
            for epoch in range(WARM_UP + epochs):
                for _ in range(steps):
                    next(training)
                with EvalLoader(source, spec, batch=batch, shard=alone, **how) as evaluation:
                    for _ in evaluation:
                        pass
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # what is freed is not held
                if epoch >= WARM_UP:
                    yield Epoch(process.memory_info().rss, process.num_fds(), process.num_threads())


def slope(rows: list[Epoch]) -> float:
    """By how much of itself resident memory grows an epoch, on the straight line that fits best."""
    resident = np.array([row.resident for row in rows], float)
    return float(np.polyfit(np.arange(len(rows)), resident, 1)[0] / resident.mean())
