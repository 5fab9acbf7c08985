"""What each way to combine the workers' correlations sends, holds and takes, against the width D of the embeddings.

Bytes are read from the kernel's counters of the loopback interface, over which workers of one host talk: whatever else
talks there is counted too. Memory is one worker's. What does not fit, or takes too long here, is computed from the
terms of loss.py and marked as computed.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from dali.order import split
from pipeline import workers
from pipeline.loss import BarlowTwinsLoss
from pipeline.peak_memory import peak_memory

MODES = ("allreduce", "gather", "gram")
LONGEST = 9e11  # multiply-adds of a worker, beyond which a row is computed instead of measured; a minute of a core
LONG = 1e11  # beyond which once is enough


class Row(NamedTuple):
    """One forward and backward of the loss: bytes that a worker sent, bytes it held at most, seconds (or None)."""

    mode: str
    dim: int
    batch: int
    workers: int
    sent: float
    held: float
    seconds: float | None  # None: computed, not measured


def measure(dims: list[int], batches: list[int], repeats: int = 3) -> list[Row]:
    """All rows, on all workers alike. Called by a job of as many workers as the figure is for."""
    world = workers.start()
    rows = []
    for batch in batches:
        for dim in dims:
            for mode in MODES:
                known = computed(mode, dim, batch, world.size)
                free = workers.from_rank_0(psutil.virtual_memory().available, "bench.free")
                if known.held * world.size > free / 2 or _multiply_adds(mode, dim, batch, world.size) > LONGEST:
                    rows.append(known)
                else:
                    long = _multiply_adds(mode, dim, batch, world.size) > LONG
                    rows.append(_measured(world, mode, dim, batch, 1 if long else repeats))
                if world.rank == 0:
                    print(describe(rows[-1]), flush=True)
    return rows


def _measured(world: workers.World, mode: str, dim: int, batch: int, repeats: int) -> Row:
    own = split(batch, world.size)[world.rank]
    generator = torch.Generator().manual_seed(world.rank)
    z1, z2 = (torch.randn(own.stop - own.start, dim, generator=generator, requires_grad=True) for _ in range(2))
    loss = BarlowTwinsLoss(dim, 0.0051, combine=mode)

    seconds: list[float] = []

    def once() -> None:
        z1.grad = z2.grad = None
        start = time.perf_counter()
        loss(z1, z2, batch).loss.backward()
        seconds.append(time.perf_counter() - start)

    once()  # buffers of Horovod and threads of torch are made once
    with peak_memory(z1.device) as peak:
        once()
    idle = _sent(world, lambda: None)
    sent = [_sent(world, once) - idle for _ in range(repeats)]
    held = max(workers.gather_objects(peak.bytes, "bench.held"))
    return Row(
        mode, dim, batch, world.size, max(0.0, statistics.median(sent)), held, statistics.median(seconds[-repeats:])
    )


def _sent(world: workers.World, work: Callable[[], None]) -> float:
    """Bytes a worker sends while all do `work`: what the interface sent, a worker."""
    workers.from_rank_0(None, "bench.begin")
    before = _interface() if world.rank == 0 else 0
    workers.from_rank_0(None, "bench.go")
    work()
    workers.gather_objects(None, "bench.done")
    after = _interface() if world.rank == 0 else 0
    return float(workers.from_rank_0((after - before) / world.size, "bench.sent"))


def _interface() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])  # proc(5): the ninth number is the bytes sent


def computed(mode: str, dim: int, batch: int, size: int) -> Row:
    """From loss.py: float32 numbers that a ring sends, and the tensors alive at the worst moment."""
    others = (size - 1) / size
    local = batch / size
    rows = 2 * batch * dim
    sent = {"allreduce": 2 * dim**2, "gather": rows, "gram": rows}[mode] * others
    embeddings = 8 * local * dim  # both views: normalised, their gradients through the loss and its normalisation
    held = {"allreduce": dim**2, "gather": dim**2 + rows, "gram": rows + 2 * local * batch}[mode] + embeddings
    return Row(mode, dim, batch, size, 4 * sent, 4 * held, None)


def _multiply_adds(mode: str, dim: int, batch: int, size: int) -> float:
    local = batch / size
    per_pass = {"allreduce": local * dim**2, "gather": batch * dim**2, "gram": 2 * local * batch * dim}[mode]
    backward = 2 * local * (2 * batch * dim if mode == "gram" else dim**2)
    return per_pass + backward


def describe(row: Row) -> str:
    seconds = "not measured" if row.seconds is None else f"{row.seconds:.3f} s"
    return (
        f"{row.mode:<9}  D {row.dim:>6,}  B {row.batch:>5,}  sent {row.sent / 2**20:>10,.1f} MiB  "
        f"held {row.held / 2**20:>10,.1f} MiB  {seconds}"
    )


def table(rows: list[Row]) -> str:
    """The rows in Markdown; computed ones in italics."""
    lines = ["| B | D | combine | sent, MiB | held, MiB | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        sent, held = f"{row.sent / 2**20:,.1f}", f"{row.held / 2**20:,.0f}"
        if row.seconds is None:
            sent, held = f"*{sent}*", f"*{held}*"
        seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
        lines.append(f"| {row.batch:,} | {row.dim:,} | {row.mode} | {sent} | {held} | {seconds} |")
    return "\n".join(lines)


def speedups(rows: list[Row]) -> list[str]:
    """How many times faster gram was than forming c, where both were measured."""
    seconds = {(row.mode, row.dim, row.batch): row.seconds for row in rows}
    lines = []
    for (mode, dim, batch), gram in seconds.items():
        whole = seconds.get(("allreduce", dim, batch))
        if mode == "gram" and gram and whole:
            lines.append(f"B {batch:,}, D {dim:,}: gram is {whole / gram:.1f} times as fast as allreduce")
    return lines


def figure(rows: list[Row], path: Path) -> None:
    """Bytes sent and held against D, a line for each way and batch; hollow marks are computed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(picture)
    left, right = picture.subplots(1, 2)
    colours = dict(zip(MODES, ("tab:blue", "tab:green", "tab:red"), strict=True))
    for axes, key, title in ((left, "sent", "sent by a worker, MiB"), (right, "held", "held by a worker, MiB")):
        for mode in MODES:
            for batch, style in zip(sorted({row.batch for row in rows}), ("-", "--", ":"), strict=False):
                line = [row for row in rows if row.mode == mode and row.batch == batch]
                dims, values = [row.dim for row in line], [getattr(row, key) / 2**20 for row in line]
                axes.plot(dims, values, style, color=colours[mode], label=f"{mode}, B = {batch:,}")
                for row, value in zip(line, values, strict=True):
                    face = colours[mode] if row.seconds is not None else "white"
                    axes.plot(row.dim, value, "o", color=colours[mode], markerfacecolor=face)
        axes.set(xscale="log", yscale="log", xlabel="D", title=title)
        axes.set_xticks(sorted({row.dim for row in rows}), [f"{d:,}" for d in sorted({row.dim for row in rows})])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
