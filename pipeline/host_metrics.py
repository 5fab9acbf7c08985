"""Use of this host's CPU, memory, disk, network and GPUs, under the names MLflow's own page for them expects."""

from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]


class HostMetrics:
    """Samples the host. Network is counted from the construction on.

    Args:
        disk: a folder on the disk to report.
    """

    def __init__(self, disk: Path) -> None:
        self._disk = str(disk)
        self._network = psutil.net_io_counters()
        self._gpus = _gpu_handles()
        psutil.cpu_percent()  # the first call has no interval to speak of and returns 0

    def sample(self) -> dict[str, float]:
        """Megabytes (1e6), percent and watts; CPU use is since the last sample."""
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(self._disk), psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / 1e6,
            "network_receive_megabytes": (network.bytes_recv - self._network.bytes_recv) / 1e6,
            "network_transmit_megabytes": (network.bytes_sent - self._network.bytes_sent) / 1e6,
        }
        for index, handle in enumerate(self._gpus):
            values |= {f"gpu_{index}_{name}": value for name, value in _sample_gpu(handle).items()}
        return {f"system/{name}": round(float(value), 1) for name, value in values.items()}


def _gpu_handles() -> list:
    import pynvml

    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, no GPU
        return []


def _sample_gpu(handle) -> dict[str, float]:
    import pynvml

    values: dict[str, float] = {}
    with suppress(pynvml.NVMLError):  # each alone: slices of a GPU, for one, report memory but no utilisation
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        values["memory_usage_megabytes"] = memory.used / 1e6
        values["memory_usage_percentage"] = 100 * memory.used / memory.total
    with suppress(pynvml.NVMLError):
        values["utilization_percentage"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    with suppress(pynvml.NVMLError):
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        values["power_usage_watts"] = watts
        values["power_usage_percentage"] = 100_000 * watts / pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    return values
