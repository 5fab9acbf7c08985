"""Every collective, and what each worker is: rank, device, threads. The only user of Horovod in the training path.

All workers must make the same calls with the same names; a call whose name differs is waited for until the stall check
ends the job. What a backward sends, and by which factor it scales, is said at each differentiable function.
"""

import os
import socket
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from pipeline import watchdog

if os.environ.get("HOROVOD_ELASTIC") == "1":
    # Horovod: a value given for either is written into the other's place when hvd.init is called again. Workers that
    # stayed then fuse other tensors than newcomers do, and Gloo aborts ("length <= op.nbytes"). Its defaults are safe.
    for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"):
        os.environ.pop(name, None)
else:
    # Horovod: with nothing to do, workers negotiate every so many ms, and at 1 ms that took a fifth of a worker's core.
    # A collective waits for none of this: by our patch it starts a round at once.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
# Horovod: a group of gradients is summed in a buffer of its own. Fused with whatever else is ready, where a tensor lies
# in the buffer, hence the order in which three workers' parts are added, would depend on timing.
os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")

import horovod.torch as hvd
import torch
from torch import Tensor

from dali.errors import InputError
from dali.order import Shard

SPIN_SECONDS, POLL_SECONDS = 2e-4, 1e-4  # most collectives of a few numbers are done within the first
LONGEST_POLL_SECONDS = 1e-3
ProcessSet: TypeAlias = hvd.ProcessSet
everyone: ProcessSet = hvd.global_process_set
_rank = 0


class World(NamedTuple):
    """This worker's place in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]  # one a rank
    process_set: ProcessSet = everyone  # those who share a batch; rank and size count within it

    @property
    def shard(self) -> Shard:
        return Shard(self.rank, self.size)


def start() -> World:
    """Join the job that horovodrun started, or be a job of one."""
    join()
    return place()._replace(hosts=host_names())


def join() -> None:
    """Be one of the job's workers, without a word to the others yet."""
    hvd.init()


def place() -> World:
    """This worker's place as it is now; `hosts` unknown."""
    return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), ())


def last_rank() -> int:
    """The rank now, or, between two groups of workers, the one before."""
    global _rank
    if hvd.is_initialized():
        _rank = hvd.rank()
    return _rank


def host_names() -> tuple[str, ...]:
    """Every worker's host, by rank."""
    return tuple(hvd.allgather_object(socket.gethostname(), name="hosts"))


def process_set(ranks: Iterable[int]) -> ProcessSet:
    """A set of workers with collectives of its own; made by all workers, in the same order.

    Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 from the start, unless it is all of them.
    """
    ranks = list(ranks)
    return everyone if ranks == list(range(hvd.size())) else hvd.add_process_set(ranks)


def built() -> dict[str, bool]:
    """What this Horovod was built with."""
    return {"Gloo": hvd.gloo_built(), "NCCL": bool(hvd.nccl_built()), "MPI": bool(hvd.mpi_built())}


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
    mistakes = gather_objects(mistake, "together")
    first = next((m for m in mistakes if m is not None), None)
    if first is not None:
        raise InputError(first)


# --- Sums and rows --------------------------------------------------------------------------------------------------


def sum_(x: Tensor, name: str, process_set: ProcessSet = everyone) -> Tensor:
    """`x` becomes its sum over the workers, in place. Outside autograd."""
    _wait(hvd.allreduce_async_(_flat(x), name=name, op=hvd.Sum, process_set=process_set), name)
    return x


def _wait(handle: int, name: str) -> Tensor:
    """The result of a collective.

    `hvd.synchronize` alone spins: where workers share cores, it takes them from those it waits for.
    """
    start = time.perf_counter()
    with watchdog.waiting(name):
        while not hvd.poll(handle):
            waited = time.perf_counter() - start
            time.sleep(0 if waited < SPIN_SECONDS else min(max(POLL_SECONDS, waited / 20), LONGEST_POLL_SECONDS))
        return hvd.synchronize(handle)


def _flat(x: Tensor) -> Tensor:
    """The same memory as one row: Horovod refuses channels_last tensors, though elementwise sums need no order."""
    dense = x.is_contiguous() or any(
        x.dim() == dims and x.is_contiguous(memory_format=order)
        for dims, order in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    assert dense, f"a tensor with holes: {tuple(x.shape)}, strides {x.stride()}"
    return x.detach().as_strided((x.numel(),), (1,))


def gather(x: Tensor, name: str, process_set: ProcessSet = everyone) -> Tensor:
    """Rows of all workers, in order of rank; each may bring another number of rows. Outside autograd."""
    return _wait(hvd.allgather_async(x.contiguous(), name=name, process_set=process_set), name)


def barrier(name: str) -> None:
    """Wait until all workers are here; unlike a collective of Horovod's own, without taking a core from the others."""
    _wait(hvd.allreduce_async(torch.zeros(1), name=f"barrier.{name}", op=hvd.Sum), f"barrier.{name}")


def gather_objects(value: Any, name: str) -> list[Any]:
    """One picklable object of each worker, by rank."""
    barrier(name)
    with watchdog.waiting(name):
        return hvd.allgather_object(value, name=name)


def from_rank_0(value: Any, name: str) -> Any:
    """Rank 0's picklable object, on all workers: how a decision is taken once."""
    barrier(name)
    with watchdog.waiting(name):
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
    tensors = {name: _flat(t) for name, t in model.state_dict().items() if t.numel()}
    with watchdog.waiting("parameters"):
        hvd.broadcast_parameters(tensors, root_rank=0)
    check_equal_state(model, optimizer)


def fingerprints(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """A checksum of each parameter, buffer, piece of optimizer state and learning rate, by name."""
    prints = {name: _crc(t) for name, t in model.state_dict().items()}
    if optimizer is None:
        return prints
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


def digest(model: torch.nn.Module) -> str:
    """Eight letters for a model's parameters and buffers, by which runs name what they made or used."""
    return f"{zlib.crc32(repr(sorted(fingerprints(model).items())).encode()):08x}"


def check_equal_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stop unless all workers hold the same state.

    Raises:
        RuntimeError: naming the first tensor that differs from rank 0's, and the ranks.
    """
    rows = gather_objects(fingerprints(model, optimizer), "fingerprints")
    for name in sorted({name for row in rows for name in row}):
        strays = [rank for rank, row in enumerate(rows) if row.get(name) != rows[0].get(name)]
        if strays:
            raise RuntimeError(f"{name} differs between workers: rank 0 and rank {', '.join(map(str, strays))}")


def _crc(value: Any) -> int:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    return zlib.crc32(repr(value).encode())


# --- Gradients ------------------------------------------------------------------------------------------------------


class GradientSum:
    """Turns each parameter's gradient, a worker's own contribution, into the sum over the workers. Never an average.

    A group is sent as soon as backward has finished all its gradients, while backward goes on. Groups are fixed, of
    about equal bytes, so that the order of summation, hence every bit of the result, does not depend on timing.

    `hvd.DistributedOptimizer(op=Sum, groups=...)` does the same, except where parameters take part in differing numbers
    of backward passes (`passes`, for micro-batches): it then sends gradients one by one and fuses them by timing, and
    three workers no longer repeat bit for bit. Its subclass also hides the optimizer's own `zero_grad` and AMP support.
    """

    def __init__(
        self,
        passes: Iterable[tuple[torch.nn.Parameter, int]],
        groups: int,
        process_set: ProcessSet = everyone,
    ) -> None:
        """`passes`: each trained parameter, as constructed, and how many backward passes of a step it is in."""
        self.process_set = process_set
        self.passes = list(passes)
        self.groups = _split_by_bytes([p for p, _ in reversed(self.passes)], groups)
        self.handles: dict[int, int] = {}
        self.remaining: list[int] = []
        self.gradients: list[Tensor] = []
        for p, _ in self.passes:
            # One gradient for the whole run, in the parameter's own memory order: fused updates walk both side by side
            p.grad = torch.zeros_like(p)
            self.gradients.append(p.grad)
        group_of = {p: index for index, group in enumerate(self.groups) for p in group}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: self._finished(group_of[p])) for p, _ in self.passes
        ]
        self._expected = [0] * len(self.groups)
        for p, count in self.passes:
            self._expected[group_of[p]] += count
        self.start()

    def start(self) -> None:
        """Begin a step: all gradients become zero, in place."""
        assert not self.handles, "start() before the last step's wait()"
        torch._foreach_zero_(self.gradients)
        self.remaining = list(self._expected)

    def wait(self) -> None:
        """All gradients are sums afterwards. A group that backward did not finish (unused parameters) is sent now."""
        for index in range(len(self.groups)):
            if index not in self.handles:
                self._send(index)
        for index in sorted(self.handles):
            _wait(self.handles[index], f"gradients.{index}")
        self.handles.clear()

    def close(self) -> None:
        """Let go of the parameters; another may then sum their gradients."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Drop what was on its way to workers that are gone."""
        self.handles.clear()

    def not_finite(self, loss: Tensor) -> Tensor:
        """1.0 if the loss or any summed gradient is NaN or infinite, else 0.0; a scalar on the device. After `wait`."""
        norms = torch.stack(torch._foreach_norm(self.gradients))
        return (~torch.isfinite(norms.sum() + loss.detach())).to(torch.float32)

    def _finished(self, index: int) -> None:
        self.remaining[index] -= 1
        assert self.remaining[index] >= 0, "more backward passes than announced"
        if self.remaining[index] == 0:
            self._send(index)

    def _send(self, index: int) -> None:
        gradients = [_flat(p.grad) for p in self.groups[index] if p.grad is not None]
        self.handles[index] = hvd.grouped_allreduce_async_(
            gradients, name=f"gradients.{index}", op=hvd.Sum, process_set=self.process_set
        )


def _split_by_bytes(parameters: list[torch.nn.Parameter], groups: int) -> list[list[torch.nn.Parameter]]:
    """At most `groups` contiguous parts of about equal bytes, none empty."""
    total = sum(p.nbytes for p in parameters)
    parts: dict[int, list[torch.nn.Parameter]] = {}
    before = 0
    for p in parameters:
        parts.setdefault(min(groups - 1, (before + p.nbytes // 2) * groups // max(total, 1)), []).append(p)
        before += p.nbytes
    return list(parts.values())


class Vote:
    """What all workers must do after the same step, decided without waiting: the largest value any of them cast.

    Each step casts a small number; its maximum over the workers is read one step later, so that no step waits for it.
    With `unanimous` it is the minimum: something happens only if all want it.
    """

    def __init__(self, name: str = "vote", unanimous: bool = False) -> None:
        """`name` keeps votes on different matters apart."""
        self._name, self._op = name, hvd.Min if unanimous else hvd.Max
        self._pending: int | None = None
        self._casts = 0

    def cast(self, value: int) -> int:
        """Cast this step's value; returns the outcome of the step before (0 at the first)."""
        name = f"{self._name}.{self._casts % 2}"  # the last one may still be on its way
        self._casts += 1
        handle = hvd.allreduce_async(torch.tensor([value], dtype=torch.int32), name=name, op=self._op)
        before, self._pending = self._pending, handle
        return 0 if before is None else int(_wait(before, "vote"))

    def close(self) -> None:
        """Take in the last outcome, so that nothing is pending."""
        if self._pending is not None:
            _wait(self._pending, "vote")
            self._pending = None


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
