"""The most memory that a block of code held at one time, beyond what was held when it began."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Peak:
    """`bytes` is set when the block ends."""

    bytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """On the CPU the kernel's high-water mark of resident memory, set back first; on a GPU torch's own count.

    Freed memory is given back to the system before the block, so that what it takes is seen.
    """
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the mark becomes what is resident now
    before = _status("VmRSS")
    yield peak
    peak.bytes = max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
