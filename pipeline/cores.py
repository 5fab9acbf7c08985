"""How many cores there are, and each worker's share: for torch, and for DALI."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # where Linux shows the limits of groups of processes
OWN_GROUPS = Path("/proc/self/cgroup")  # this process's: NUMBER:CONTROLLERS:PATH a line; of version 2, 0::PATH


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, less what a quota takes away (a container's, a job's)."""
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _groups() if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *quotas]))


def _groups() -> set[Path]:
    """The folders of this process's group and of those above it, which limit it too; those that are not shown here,
    as in a container, do not exist."""
    folders = {CGROUPS}
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            own = CGROUPS / ("cpu" if controllers else "") / path.lstrip("/")
            folders |= {own, *(above for above in own.parents if above.is_relative_to(CGROUPS))}
    return folders


def _quota(folder: Path) -> int | None:
    """Whole cores that a group may use; None: as many as there are. `cpu.max` of version 2, two files of version 1."""
    try:
        version_2 = folder / "cpu.max"
        if version_2.exists():
            quota, period = version_2.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) // int(period)
    except (OSError, ValueError):
        return None


def threads_per_worker(local_size: int) -> int:
    """This worker's share of the host's cores, at least 1: for torch and for DALI."""
    return max(1, usable_cores() // local_size)
