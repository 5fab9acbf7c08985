"""What it costs that nothing is lost: each part timed by itself, as a share of a training step."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali.errors import InputError
from dali.loader import Batch
from dali.sources import ArraySource, Source, open_source
from pipeline import checkpoint, config, lease, pretraining, training, watchdog, workers
from pipeline.config import Config
from pipeline.guard import Guard
from pipeline.host_metrics import HostMetrics
from pipeline.journal import Journal
from pipeline.plan import make_plan
from pipeline.sync_bn import SyncBatchNorm
from pipeline.training import Outcome, Run

CONFIG = config.CONFIGS / "fashion_mnist.yaml"
STEPS, WARM_UP = 40, 5


class Row(NamedTuple):
    """A part's cost: seconds each time, and after how many steps (or how many seconds, as steps) it comes again."""

    what: str
    seconds: float
    every_steps: float

    @property
    def a_step(self) -> float:
        return self.seconds / self.every_steps


class Cost(NamedTuple):
    step_seconds: float
    rows: list[Row]

    @property
    def share(self) -> float:
        """Of all parts together, of a step."""
        return sum(row.a_step for row in self.rows) / self.step_seconds


def measure(words: list[str], steps: int = STEPS) -> Cost:
    """For the fashion_mnist config with `words`; on every worker of a job. Images are made up where there are none."""
    world = workers.start()
    shared = workers.from_rank_0(tempfile.mkdtemp() if world.rank == 0 else None, "folder")
    made = config.load(CONFIG, [f"output={shared}", *words])
    source = _images(made)
    plan = make_plan(made, len(source))
    device = workers.choose_device(made.device, world.local_rank, world.local_size)
    run = pretraining.build(made, world, device, source, plan)
    taken = []
    with training.open_loader(run) as loader:
        for batch in loader:
            start = time.perf_counter()
            outcome = training.train_step(run, batch.y1, batch.y2)
            float(outcome.terms.loss)
            taken.append(time.perf_counter() - start + loader.wait_seconds)
            if len(taken) == WARM_UP + steps:
                break
    step_seconds = statistics.median(taken[WARM_UP:])
    cost = Cost(step_seconds, _parts(run, batch, outcome, step_seconds, Path(shared)))
    if world.rank == 0:
        shutil.rmtree(shared)
    return cost


def _images(made: Config) -> Source:
    try:
        return open_source(made.data, "train")
    except InputError:
        size, channels = made.views.size, made.data.channels
        pixels = np.random.default_rng(0).integers(0, 256, (60_000, size, size, channels), dtype=np.uint8)
        return ArraySource(pixels)


def _parts(run: Run, batch: Batch, outcome: Outcome, step_seconds: float, folder: Path) -> list[Row]:
    made, plan = run.config, run.plan
    weights: dict[str, Any] = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    rest = {"step": run.step, "scaler": {}, "config": made.model_dump(mode="json"), "run_id": None, "facts": {}}
    saved = checkpoint.snapshot({**rest, **weights})
    journal = Journal(folder / "journal.jsonl")
    values = {f"metric_{index}": 1.0 / 3 for index in range(12)}
    host = HostMetrics(folder)
    held = lease.Lease.take(folder, "bench") if run.world.rank == 0 else None
    guard = Guard(made, run.source, run.model.backbone, run.world.rank, nullcontext, made.train.global_batch)
    seconds_as_steps = 1 / step_seconds

    def flags() -> None:
        run.buffers.keep()
        left_out = run.gradients.not_finite(outcome.terms.loss)
        run.buffers.restore(left_out)
        guard.after_step(run.step, batch, outcome.terms._asdict(), left_out)

    def watched() -> None:
        watchdog.enter("step")
        for _ in range(collectives):
            with watchdog.waiting("gradients"):
                pass
        watchdog.stepped(run.step)
        watchdog.enter("data")

    collectives = _collectives(run)
    watchdog.start(run.world.rank, made.train.watchdog_seconds)
    every = plan.checkpoint_steps
    rows = [
        Row("checkpoint: is it finite", _median(lambda: checkpoint.not_finite(weights)), every),
        Row("checkpoint: equal on all workers (hash)", _median(lambda: _equal(run)), every),
        Row("checkpoint: copy", _median(lambda: checkpoint.snapshot(weights)), every),
        Row(
            "checkpoint: written beside training (CPU time)",
            _median(lambda: checkpoint.save(folder, saved, made.checkpoint.keep, False), clock=time.thread_time),
            every,
        ),
        Row(
            "journal: a record",
            _median(lambda: journal.append("metrics", step=1, metrics=values)),
            made.tracking.log_every_steps,
        ),
        Row(
            "journal: the host's metrics (CPU time)",
            _median(lambda: host.sample(), clock=time.thread_time),
            made.tracking.system_metrics_seconds * seconds_as_steps,
        ),
        Row("watchdog", _median(watched, 200), 1),
        Row("non-finite guard", _median(flags, 50), 1),
        Row("vote to stop", _median(lambda: run.vote.cast(0), 50), 1),
    ]
    watchdog.stop()
    run.vote.close()
    if held is not None:
        held.release()
        rows.append(Row("lease: heartbeat", _median(lambda: held.beat()), lease.BEAT_SECONDS * seconds_as_steps))
    return rows


def _equal(run: Run) -> None:
    workers.check_equal_state(run.model, run.optimizer)


def _collectives(run: Run) -> int:
    """How many a step waits for: two a batch norm, the loss's included; c; gradients; the vote."""
    norms = [layer for part in (run.model, run.loss) for layer in part.modules() if isinstance(layer, SyncBatchNorm)]
    return 2 * len(norms) + 1 + len(run.gradients.groups) + 1


def _median(call: Callable[[], object], repeats: int = 10, clock: Callable[[], float] = time.perf_counter) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = clock()
        call()
        taken.append(clock() - start)
    return statistics.median(taken[1:])


def table(cost: Cost) -> str:
    lines = [
        f"one step: {1000 * cost.step_seconds:.1f} ms",
        "",
        "| what | ms each | every so many steps | ms a step | share of a step |",
        "|---|---|---|---|---|",
    ]
    for row in cost.rows:
        lines.append(
            f"| {row.what} | {1000 * row.seconds:.3f} | {row.every_steps:,.0f} | {1000 * row.a_step:.4f} | "
            f"{100 * row.a_step / cost.step_seconds:.3f} % |"
        )
    return "\n".join([*lines, f"| all | | | {1000 * cost.share * cost.step_seconds:.4f} | {100 * cost.share:.3f} % |"])
