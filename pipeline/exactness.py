"""How equal are runs on 1, 2, 3, ... workers? Measured on the real pipeline, all in one job of the most workers.

The first w workers form a process set for each w, so that every w starts from the very same state, step by step, and is
compared in memory with the first worker alone. Runs that go on freely are compared with a control: one worker whose
samples are permuted within each batch, which shows what rounding alone does to such a run.
"""

import math
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dali.loader import Batch
from dali.sources import open_source
from pipeline import config, pretraining, schedule, training, workers
from pipeline.config import Config
from pipeline.cores import threads_per_worker
from pipeline.plan import make_plan
from pipeline.samples import write_photographs
from pipeline.training import Run

# float64: rounding is 1e-16; a loss of D² terms and a gradient through 18 layers keep all but a few digits.
# float32: rounding is 6e-8, a factor 5e8 more; the same digits are lost on the way (docs/exactness.md has the figures).
BOUNDS = {
    "float64": {"loss": 1e-12, "statistics": 1e-12, "gradient": 1e-10},
    "float32": {"loss": 1e-4, "statistics": 1e-4, "gradient": 1e-1},
}
CONTROL_FACTOR = 10
FEW_ROUNDINGS = 100  # differences below so many are none: after a step, a control may have none at all
OTHERS_EVERY = 4  # the combines but the first take part in every fourth state: they differ in the loss alone
# What the job needs: process sets made while it runs
ENVIRONMENT = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


class Row(NamedTuple):
    """The largest difference from one worker over all steps, relative: ‖a − b‖ / ‖b‖."""

    measure: str  # "same state" or "free running"
    dtype: str
    optimizer: str
    combine: str
    workers: int
    steps: int
    samples: bool  # the same samples in the same order
    views: bool  # the same views, bit for bit
    loss: float
    statistics: float  # running means and variances of all batch norms
    gradient: float  # same state; when running freely, the weights
    bound: str
    kept: bool


class Options(NamedTuple):
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    steps: int = 20
    dtypes: tuple[str, ...] = ("float64", "float32")
    optimizers: tuple[str, ...] = ("lars", "sgd")
    combines: tuple[str, ...] = ("allreduce", "gather", "gram")


def settings(folder: Path, dtype: str, optimizer: str) -> Config:
    """ResNet-18 on 64 px views of photographs, batch 16 (which 3 does not divide), the reference's rates."""
    words = [
        f"data.path={folder}/images",
        f"output={folder}/output",
        "device=cpu",
        "data.threads=1",
        "views.size=64",
        "model.backbone=resnet18",
        "model.projector=[128, 128, 128]",
        f"optimizer.name={optimizer}",
        "train.global_batch=16",
        "train.epochs=20",
        "schedule.warmup_epochs=1",
        f"precision.dtype={dtype}",
        "precision.autocast='off'",  # some CPUs would take bf16
    ]
    return config.load(None, words)


def measure(options: Options) -> list[Row]:
    """All rows, on rank 0; an empty list on the others. Called by a job of max(options.sizes) workers."""
    world = workers.start()
    sets = {size: workers.process_set(range(size)) for size in options.sizes}
    folder = Path(workers.from_rank_0(tempfile.mkdtemp() if world.rank == 0 else None, "exactness.folder"))
    with workers.together():
        if world.rank == 0:
            write_photographs(folder / "images", 80, 160, 120)
    rows: list[Row] = []
    for dtype in options.dtypes:
        for optimizer in options.optimizers:
            made = settings(folder, dtype, optimizer)
            rows += _Comparison(made, world, sets, options).measure()
    return rows if world.rank == 0 else []


class _Comparison:
    def __init__(
        self, made: Config, world: workers.World, sets: dict[int, workers.ProcessSet], options: Options
    ) -> None:
        self.made, self.world, self.sets, self.options = made, world, sets, options
        self.source = open_source(made.data, "train")
        self.plan = make_plan(made, len(self.source))

    def _run(self, size: int, combine: str = "allreduce") -> Run | None:
        """A run of the first `size` workers; None on a worker that is not among them."""
        if self.world.rank >= size:
            return None
        made = self.made.model_copy(update={"loss": self.made.loss.model_copy(update={"combine": combine})})
        part = self.world._replace(size=size, process_set=self.sets[size])
        return pretraining.build(made, part, torch.device("cpu"), self.source, self.plan)

    def _say(self, what: str, done: int) -> None:
        if self.world.rank == 0:
            made = f"{self.made.precision.dtype} {self.made.optimizer.name}"
            print(f"{made}, {what}: {done} of {self.options.steps} steps", flush=True)

    def _row(
        self,
        measure: str,
        combine: str,
        size: int,
        steps: int,
        worst: dict[str, float],
        same: list[bool],
        bound: str,
    ) -> Row:
        limits = BOUNDS[self.made.precision.dtype]
        kept = all(same) and all(worst[key] <= limits[key] for key in limits)
        return Row(
            measure,
            self.made.precision.dtype,
            self.made.optimizer.name,
            combine,
            size,
            steps,
            same[0],
            same[1],
            worst["loss"],
            worst["statistics"],
            worst["gradient"],
            bound,
            kept,
        )

    def measure(self) -> list[Row]:
        """Rows from the same state, then of runs that go on freely."""
        one = self._run(1)
        sizes = [size for size in self.options.sizes if size > 1]
        # A gradient does not know the rule that will use it: one rule's states will do for the other combines
        first = self.made.optimizer.name == self.options.optimizers[0]
        every = {combine: OTHERS_EVERY for combine in self.options.combines[1:] if first}
        every = {self.options.combines[0]: 1} | every
        rows, curve = self._from_the_same_state(one, [(size, combine) for combine in every for size in sizes], every)
        curves = {"1": curve, "control": self._freely(1, permuted=True)}
        curves |= {str(size): self._freely(size) for size in sizes}
        return rows + self._against_the_control(curves)

    def _from_the_same_state(
        self, one: Run | None, keys: list[tuple[int, str]], every: dict[str, int]
    ) -> tuple[list[Row], "Curve | None"]:
        """One worker trains; from each of its states, every number of workers takes the same step.

        A combine takes part in one state of `every[combine]`. The one worker's own curve comes back too.
        """
        worst = {key: dict.fromkeys(("loss", "statistics", "gradient"), 0.0) for key in keys}
        same = {key: [True, True] for key in keys}
        others = {key: self._run(*key) for key in keys}
        loaders = {key: iter(training.open_loader(run)) for key, run in others.items() if run is not None}
        feed = iter(training.open_loader(one)) if one is not None else None
        losses = []
        for step in range(self.options.steps):
            state = self._shared(one, step)
            whole = next(feed) if feed is not None else None
            expected = None
            if one is not None and whole is not None:
                with _threads_for(1):
                    outcome = training.train_step(one, whole.y1, whole.y2)
                losses.append(outcome.terms.loss)
                expected = _found(one, outcome.terms.loss)
            for key, run in others.items():
                if run is None:
                    continue
                batch = next(loaders[key])
                if step % every[key[1]]:
                    continue
                run.model.load_state_dict(state)
                run.step = step
                with _threads_for(key[0]):
                    found = self._step(run, batch)
                prints = workers.gather(_prints(batch), f"prints.{key}", run.world.process_set)
                if expected is None or whole is None:
                    continue
                for name in worst[key]:
                    worst[key][name] = _larger(worst[key][name], _difference(found[name], expected[name]))
                same[key][0] &= torch.equal(prints[:, 0], _prints(whole)[:, 0])
                same[key][1] &= torch.equal(prints[:, 1:], _prints(whole)[:, 1:])
            self._say("from the same state", step + 1)
        limits = BOUNDS[self.made.precision.dtype]
        bound = f"{limits['loss']:.0e} / {limits['statistics']:.0e} / {limits['gradient']:.0e}"
        states = {c: len(range(0, self.options.steps, n)) for c, n in every.items()}
        rows = [self._row("same state", c, size, states[c], worst[size, c], same[size, c], bound) for size, c in keys]
        return rows, None if one is None else _curve(one, losses)

    def _shared(self, one: Run | None, step: int) -> dict[str, Tensor]:
        """The one worker's state, on all workers: by a file, as they are on one machine and Horovod would pickle it."""
        file = Path(self.made.output).with_name(f"state{step % 2}.pt")  # somebody may still read the one before
        if one is not None:
            torch.save(one.model.state_dict(), file)
        workers.barrier(f"state.{step}")
        shared: dict[str, Tensor] = torch.load(file)
        return shared

    def _step(self, run: Run, batch: Batch) -> dict[str, Tensor]:
        """Loss, running statistics and summed gradient of a step, up to the update."""
        plan = self.plan
        schedule.set_lr(run.optimizer, run.step, plan.warmup_steps, plan.total_steps, self.made.schedule.final_factor)
        run.gradients.start()
        outcome = training.backward(run, batch.y1, batch.y2)
        run.gradients.wait()
        return _found(run, outcome.terms.loss.detach())

    def _freely(self, size: int, permuted: bool = False) -> "Curve | None":
        """`size` workers go their own way; None on a worker that is not among them."""
        run = self._run(size)
        if run is None:
            return None
        losses = []
        loader = iter(training.open_loader(run))
        with _threads_for(size):
            for step in range(self.options.steps):
                y1, y2, _ = next(loader)
                order = torch.arange(len(y1) - 1, -1, -1) if permuted else torch.arange(len(y1))
                losses.append(training.train_step(run, y1[order], y2[order]).terms.loss)
                self._say(f"running freely, {'the control' if permuted else f'{size} workers'}", step + 1)
        return _curve(run, losses)

    def _against_the_control(self, curves: "dict[str, Curve | None]") -> list[Row]:
        """Each curve's difference from one worker's; the control's is the measure of the others'."""
        one = curves.pop("1")
        if one is None:
            return []
        rows, control = [], {}
        for name, curve in curves.items():
            assert curve is not None
            found = {
                "loss": float(((curve.losses - one.losses) / one.losses).abs().max()),
                "statistics": _difference(curve.statistics, one.statistics),
                "gradient": _difference(curve.weights, one.weights),
            }
            combine, steps = self.options.combines[0], self.options.steps
            if name == "control":
                control = found
                rows.append(self._row("control", combine, 1, steps, found, [False, True], ""))
            else:
                row = self._row("free running", combine, int(name), steps, found, [True, True], "")
                rounding = FEW_ROUNDINGS * torch.finfo(one.weights.dtype).eps
                kept = all(found[key] <= max(CONTROL_FACTOR * control[key], rounding) for key in found)
                rows.append(row._replace(bound=f"{CONTROL_FACTOR} x control", kept=kept))
        return rows


def _larger(worst: float, found: float) -> float:
    """Python's own `max` passes over NaN; no difference is worse."""
    return math.inf if math.isnan(found) else max(worst, found)


class Curve(NamedTuple):
    """What a run that went on freely came to."""

    losses: Tensor
    statistics: Tensor
    weights: Tensor


def _curve(run: Run, losses: list[Tensor]) -> Curve:
    return Curve(
        torch.stack(losses), _statistics(run), torch.cat([p.detach().flatten() for p in run.model.parameters()])
    )


def _found(run: Run, loss: Tensor) -> dict[str, Tensor]:
    """Loss, running statistics and summed gradient of the step just done."""
    gradients = [p.grad.flatten() for p in run.model.parameters() if p.grad is not None]
    return {"loss": loss.reshape(1).clone(), "statistics": _statistics(run), "gradient": torch.cat(gradients)}


@contextmanager
def _threads_for(size: int) -> Iterator[None]:
    """A block in which each of the `size` workers at work has its share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_worker(size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _statistics(run: Run) -> Tensor:
    return torch.cat([b.detach().flatten() for name, b in run.model.named_buffers() if "running" in name]).clone()


def _prints(batch: Batch) -> Tensor:
    """Per sample: its index and a checksum of each view, (n, 3) int64."""
    rows = [
        (int(index), zlib.crc32(a.contiguous().numpy().data), zlib.crc32(b.contiguous().numpy().data))
        for index, a, b in zip(batch.indices, batch.y1, batch.y2, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    heads = "type, rule, combine, workers, steps, samples, views, loss, BN statistics, gradient (weights), bound,"
    lines = [f"| | {heads.replace(',', ' |')} |", "|---" * 13 + "|"]
    for row in rows:
        words = [row.measure, row.dtype, row.optimizer, row.combine, str(row.workers), str(row.steps)]
        words += ["equal" if row.samples else "permuted" if row.measure == "control" else "DIFFER"]
        words += ["equal" if row.views else "DIFFER"]
        words += [f"{value:.1e}" for value in (row.loss, row.statistics, row.gradient)]
        words += [row.bound, "" if row.measure == "control" else "kept" if row.kept else "EXCEEDED"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """A row for each type and rule, in Markdown: the most of all numbers of workers and combines; README's table."""
    heads = "most of all against one worker, loss, batch statistics, gradient, weights freely, the control's,"
    lines = [f"| {heads.replace(',', ' |')}", "|---" * 6 + "|"]
    for dtype, rule in dict.fromkeys((row.dtype, row.optimizer) for row in rows):
        mine = [row for row in rows if (row.dtype, row.optimizer) == (dtype, rule)]
        same, free, control = (
            [row for row in mine if row.measure == name] for name in ("same state", "free running", "control")
        )
        figures = [[row.loss for row in same], [row.statistics for row in same], [row.gradient for row in same]]
        figures += [[row.gradient for row in free], [row.gradient for row in control]]
        words = [f"{max(values):.1e}" if values else "" for values in figures]
        lines.append(f"| {dtype}, {rule.upper()} | {' | '.join(words)} |")
    return "\n".join(lines)
