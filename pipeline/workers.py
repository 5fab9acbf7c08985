"""Every collective, and what each worker is: rank, device, threads. The only user of Horovod in the training path.

All workers must make the same calls with the same names; a call whose name differs is waited for until the stall check
ends the job. What a backward sends, and by which factor it scales, is said at each differentiable function.
"""

import os
import socket
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Horovod: the pause between two rounds of negotiation is the floor under every small collective; its default is 1 ms.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")
# Horovod: a group of gradients is summed in a buffer of its own. Fused with whatever else is ready, where a tensor lies
# in the buffer, hence the order in which three workers' parts are added, would depend on timing.
os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")

import horovod.torch as hvd
import torch
from torch import Tensor

from dali.errors import InputError
from dali.order import Shard

ProcessSet = hvd.ProcessSet
everyone = hvd.global_process_set


class World(NamedTuple):
    """This worker's place in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]  # one a rank

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.size)


def start() -> World:
    """Join the job that horovodrun started, or be a job of one."""
    hvd.init()
    hosts = tuple(hvd.allgather_object(socket.gethostname(), name="hosts"))
    return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hosts)


def stop() -> None:
    """Leave the job in order: no collective of this worker's is pending afterwards."""
    hvd.shutdown()


@contextmanager
def together() -> Iterator[None]:
    """A block that all workers leave in the same way: a user's mistake seen by one is raised by all.

    Raises:
        InputError: the message of the lowest rank that had one, with rank and host unless that is rank 0.
    """
    mistake: str | None = None
    try:
        yield
    except InputError as error:
        mistake = str(error)
        if hvd.rank() != 0:
            mistake = f"rank {hvd.rank()} on {socket.gethostname()}: {mistake}"
    mistakes = hvd.allgather_object(mistake, name="together")
    first = next((m for m in mistakes if m is not None), None)
    if first is not None:
        raise InputError(first)


# --- Sums and rows --------------------------------------------------------------------------------------------------


def sum_(x: Tensor, name: str, process_set: ProcessSet = everyone) -> Tensor:
    """`x` becomes its sum over the workers, in place. Outside autograd."""
    return hvd.synchronize(hvd.allreduce_async_(x, name=name, op=hvd.Sum, process_set=process_set))


def gather(x: Tensor, name: str, process_set: ProcessSet = everyone) -> Tensor:
    """Rows of all workers, in order of rank; each may bring another number of rows. Outside autograd."""
    return hvd.synchronize(hvd.allgather_async(x.contiguous(), name=name, process_set=process_set))


def gather_objects(value: Any, name: str) -> list[Any]:
    """One picklable object of each worker, by rank."""
    return hvd.allgather_object(value, name=name)


def from_rank_0(value: Any, name: str) -> Any:
    """Rank 0's picklable object, on all workers: how a decision is taken once."""
    return hvd.broadcast_object(value, root_rank=0, name=name)


# --- State ----------------------------------------------------------------------------------------------------------


def share_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give all workers rank 0's optimizer state, parameters and buffers, and check that they have it.

    `hvd.broadcast_optimizer_state` is not used: on an empty state it calls `step()`, and weight decay then moves the
    weights. State travels as an object, the parameters last, so that nothing can touch them afterwards.
    """
    state = from_rank_0(optimizer.state_dict() if hvd.rank() == 0 else None, "optimizer_state")
    if hvd.rank() != 0:
        optimizer.load_state_dict(state)
    tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    hvd.broadcast_parameters(tensors, root_rank=0)
    check_equal_state(model, optimizer)


def fingerprints(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """A checksum of each parameter, buffer, piece of optimizer state and learning rate, by name."""
    prints = {name: _crc(t) for name, t in model.state_dict().items()}
    state = optimizer.state_dict()
    for index, values in state["state"].items():
        prints |= {f"optimizer.state.{index}.{key}": _crc(value) for key, value in values.items()}
    for group in state["param_groups"]:
        prints |= {
            f"optimizer.{group.get('name')}.{key}": _crc(value)
            for key, value in group.items()
            if isinstance(value, float)
        }
    return prints


def check_equal_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stop unless all workers hold the same state.

    Raises:
        RuntimeError: naming the first tensor that differs from rank 0's, and the ranks.
    """
    rows = gather_objects(fingerprints(model, optimizer), "fingerprints")
    for name in rows[0].keys() | {name for row in rows for name in row}:
        strays = [rank for rank, row in enumerate(rows) if row.get(name) != rows[0].get(name)]
        if strays:
            raise RuntimeError(f"{name} differs between workers: rank 0 and rank {', '.join(map(str, strays))}")


def _crc(value: Any) -> int:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0
    return zlib.crc32(repr(value).encode())


# --- The optimizer --------------------------------------------------------------------------------------------------


def sum_gradients(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    groups: int,
    backward_passes: int = 1,
    process_set: ProcessSet = everyone,
) -> Any:
    """Wrap `optimizer` so that each gradient becomes the sum of the workers' contributions (DESIGN: never an average).

    Gradients travel during backward in `groups` fixed groups, so that the order of summation, hence every bit of the
    result, does not depend on which gradient is ready first.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=trained,
        op=hvd.Sum,
        groups=min(groups, len(trained)),
        backward_passes_per_step=backward_passes,
        process_set=process_set,
    )


# --- Device and threads ---------------------------------------------------------------------------------------------


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a local rank: its own GPU, or the CPU.

    Raises:
        InputError: `cuda` without a GPU, or fewer GPUs than workers on this host.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise InputError(f"device: cuda, but no GPU is usable on {socket.gethostname()}; write device=cpu or auto")
    if local_size > gpus:
        raise InputError(
            f"{local_size} workers on {socket.gethostname()}, which has {gpus} GPU{'s' * (gpus > 1)}; "
            "start one worker a GPU (-np, -H host:GPUS), or write device=cpu"
        )
    return torch.device("cuda", local_rank)


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, less what a container's quota takes away."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = open("/sys/fs/cgroup/cpu.max").read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_per_worker(local_size: int) -> int:
    """This worker's share of the host's cores, at least 1: for torch and for DALI."""
    return max(1, usable_cores() // local_size)
