"""How equal are runs on 1, 2, 3, ... workers? Measured on the real pipeline, all in one job of the most workers.

The first w workers form a process set for each w, so that every w starts from the very same state, step by step, and is
compared in memory with the first worker alone. Runs that go on freely are compared with a control: one worker whose
samples are permuted within each batch, which shows what rounding alone does to such a run.
"""

import copy
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dali.loader import Batch
from dali.sources import open_source
from pipeline import config, pretraining, schedule, training, workers
from pipeline.config import Config
from pipeline.launching import KEEP_MEMORY
from pipeline.plan import make_plan
from pipeline.samples import write_photographs
from pipeline.training import Run

# float64: rounding is 1e-16; a loss of D² terms and a gradient through 18 layers keep all but a few digits.
# float32: rounding is 6e-8, a factor 5e8 more; the same digits are lost on the way (docs/exactness.md has the figures).
BOUNDS = {
    "float64": {"loss": 1e-12, "statistics": 1e-12, "gradient": 1e-10},
    "float32": {"loss": 1e-4, "statistics": 1e-4, "gradient": 2e-2},
}
CONTROL_FACTOR = 10
# What the job needs: process sets made while it runs, and memory that stays mapped
ENVIRONMENT = KEEP_MEMORY | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


class Row(NamedTuple):
    """The largest difference from one worker over all steps, relative: ‖a − b‖ / ‖b‖."""

    measure: str  # "same state" or "free running"
    dtype: str
    optimizer: str
    combine: str
    workers: int
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
            comparison = _Comparison(made, world, sets, options)
            rows += comparison.from_the_same_state()
            rows += comparison.running_freely()
            if world.rank == 0:
                print(f"measured {dtype} {optimizer}", flush=True)
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

    def _row(self, measure: str, combine: str, size: int, worst: dict[str, float], same: list[bool], bound: str) -> Row:
        limits = BOUNDS[self.made.precision.dtype]
        kept = all(same) and (measure == "free running" or all(worst[key] <= limits[key] for key in limits))
        return Row(
            measure,
            self.made.precision.dtype,
            self.made.optimizer.name,
            combine,
            size,
            same[0],
            same[1],
            worst["loss"],
            worst["statistics"],
            worst["gradient"],
            bound,
            kept,
        )

    def from_the_same_state(self) -> list[Row]:
        """One worker trains; from each of its states, every number of workers takes the same step."""
        # A gradient does not know the rule that will use it: one rule's states will do for the other combines
        first = self.made.optimizer.name == self.options.optimizers[0]
        combines = self.options.combines if first else self.options.combines[:1]
        names = ("loss", "statistics", "gradient")
        worst = {(size, c): dict.fromkeys(names, 0.0) for size in self.options.sizes for c in combines}
        same = {key: [True, True] for key in worst}
        reference = self._run(1)
        others = {key: self._run(*key) for key in worst}
        loaders = {key: iter(training.open_loader(run)) for key, run in others.items() if run is not None}
        feed = iter(training.open_loader(reference)) if reference is not None else None
        for step in range(self.options.steps):
            state = copy.deepcopy(reference.model.state_dict()) if reference is not None else None
            state = workers.from_rank_0(state, f"state.{step}")
            whole = next(feed) if feed is not None else None
            expected = None
            if reference is not None and whole is not None:
                expected = self._step(reference, whole)
            for key, run in others.items():
                if run is None:
                    continue
                run.model.load_state_dict(state)
                run.step = step
                batch = next(loaders[key])
                found = self._step(run, batch)
                prints = workers.gather(_prints(batch), f"prints.{key}", run.world.process_set)
                if expected is None or whole is None:
                    continue
                for name in worst[key]:
                    worst[key][name] = max(worst[key][name], _difference(found[name], expected[name]))
                same[key][0] &= torch.equal(prints[:, 0], _prints(whole)[:, 0])
                same[key][1] &= torch.equal(prints[:, 1:], _prints(whole)[:, 1:])
            if reference is not None:
                reference.optimizer.step()
                reference.step += 1
        limits = BOUNDS[self.made.precision.dtype]
        bound = f"{limits['loss']:.0e} / {limits['statistics']:.0e} / {limits['gradient']:.0e}"
        return [self._row("same state", c, size, worst[size, c], same[size, c], bound) for size, c in worst]

    def _step(self, run: Run, batch: Batch) -> dict[str, Tensor]:
        """Loss, running statistics and summed gradient of a step, up to the update."""
        plan = self.plan
        schedule.set_lr(run.optimizer, run.step, plan.warmup_steps, plan.total_steps, self.made.schedule.final_factor)
        run.gradients.start()
        outcome = training.backward(run, batch.y1, batch.y2)
        run.gradients.wait()
        return {
            "loss": outcome.terms.loss.detach().reshape(1).clone(),
            "statistics": _statistics(run),
            "gradient": torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]),
        }

    def running_freely(self) -> list[Row]:
        """Every number of workers goes its own way; the control is one worker with permuted samples."""
        curves: dict[str, dict[str, Tensor]] = {}
        for name, size in [("1", 1), ("control", 1), *((str(s), s) for s in self.options.sizes if s > 1)]:
            run = self._run(size)
            if run is None:
                continue
            losses = []
            loader = iter(training.open_loader(run))
            for _ in range(self.options.steps):
                y1, y2, _ = next(loader)
                order = torch.arange(len(y1) - 1, -1, -1) if name == "control" else torch.arange(len(y1))
                losses.append(training.train_step(run, y1[order], y2[order]).terms.loss)
            weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
            curves[name] = {"loss": torch.stack(losses), "statistics": _statistics(run), "gradient": weights}
        if self.world.rank != 0:
            return []
        rows = []
        worst = {
            name: {
                "loss": float(((curve["loss"] - curves["1"]["loss"]) / curves["1"]["loss"]).abs().max()),
                "statistics": _difference(curve["statistics"], curves["1"]["statistics"]),
                "gradient": _difference(curve["gradient"], curves["1"]["gradient"]),
            }
            for name, curve in curves.items()
        }
        for name, found in worst.items():
            if name == "1":
                continue
            row = self._row("free running", "allreduce", 1 if name == "control" else int(name), found, [True, True], "")
            if name == "control":
                row = row._replace(measure="control", samples=False)
            else:
                kept = all(found[key] <= CONTROL_FACTOR * worst["control"][key] for key in found)
                row = row._replace(bound=f"{CONTROL_FACTOR} x control", kept=kept)
            rows.append(row)
        return rows


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
    lines = [
        "| | type | rule | combine | workers | samples | views | loss | BN statistics | gradient (weights) | bound | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        words = [row.measure, row.dtype, row.optimizer, row.combine, str(row.workers)]
        words += ["equal" if row.samples else "permuted" if row.measure == "control" else "DIFFER"]
        words += ["equal" if row.views else "DIFFER"]
        words += [f"{value:.1e}" for value in (row.loss, row.statistics, row.gradient)]
        words += [row.bound, "" if row.measure == "control" else "kept" if row.kept else "EXCEEDED"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)
