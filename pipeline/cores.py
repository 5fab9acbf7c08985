"""How many cores there are, and each worker's share: for torch, and for DALI."""

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, less what a container's quota takes away."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_per_worker(local_size: int) -> int:
    """This worker's share of the host's cores, at least 1: for torch and for DALI."""
    return max(1, usable_cores() // local_size)
