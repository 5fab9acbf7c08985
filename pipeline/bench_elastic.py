"""`bench elastic`: a run on 2, 1, 3, 2 workers laid over the same run on one worker that nothing happens to.

Sums of another number of workers are added in another order, so curves drift apart by rounding, and training makes
more of it. What rounding alone does is shown by controls: one worker, whose samples are permuted within each batch.
"""

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pipeline import checkpoint, config, pretraining, training, workers
from pipeline.exactness import CONTROL_FACTOR
from pipeline.faults import ROUNDING, losses_of
from pipeline.samples import write_digits
from pipeline.watched_jobs import ElasticLaunch, Launch, workers_of

STEPS = 400  # enough for newcomers to start while the others go on
HOSTS = ("localhost", "127.0.0.1", socket.gethostname())  # names of this machine
CONTROLS = 4


class Curve(NamedTuple):
    """Of one run, after each of its steps: the loss; and all floating-point state at the end."""

    losses: np.ndarray  # (STEPS,)
    state: torch.Tensor


class Comparison(NamedTuple):
    """One precision's runs."""

    dtype: str
    straight: Curve
    elastic: Curve
    controls: list[Curve]  # of float32 alone: in float64 rounding stays far below what a curve shows
    workers: dict[int, int]  # how many from this step on

    @property
    def drift(self) -> np.ndarray:
        """(STEPS,): largest relative difference of the loss so far."""
        return _drift(self.elastic, self.straight)

    @property
    def band(self) -> np.ndarray:
        """(STEPS,): the same of the control that drifts most."""
        return np.max([_drift(control, self.straight) for control in self.controls] or [np.zeros(STEPS)], axis=0)

    @property
    def apart(self) -> float:
        """‖a − b‖ / ‖b‖ over all weights and statistics at the end."""
        return _apart(self.elastic, self.straight)

    @property
    def controls_apart(self) -> float:
        return max((_apart(control, self.straight) for control in self.controls), default=0.0)

    @property
    def kept(self) -> bool:
        """Whether the elastic run is the straight one: to rounding, or as far from it at the end as controls are."""
        loss, state = ROUNDING, ROUNDING
        if self.controls:  # a few of many: another run may well be further away than all of them
            loss, state = CONTROL_FACTOR * self.band[-1], CONTROL_FACTOR * self.controls_apart
        return bool(self.drift[-1] <= loss and self.apart <= state)


def _drift(curve: Curve, other: Curve) -> np.ndarray:
    return np.maximum.accumulate(np.abs(curve.losses - other.losses) / np.abs(other.losses))


def _apart(curve: Curve, other: Curve) -> float:
    return float((curve.state - other.state).norm() / other.state.norm())


def measure(say: Callable[[str], None]) -> list[Comparison]:
    """Both precisions; `say` is told what is being done."""
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        write_digits(folder / "digits")
        for dtype in ("float64", "float32"):
            say(f"{dtype}: one worker")
            straight = folder / f"{dtype}-straight"
            assert Launch([*words(folder, straight, dtype), "-np", "1"]).end() == 0
            say(f"{dtype}: 2, 1, 3, 2 workers")
            elastic = folder / f"{dtype}-elastic"
            sizes = come_and_go(folder, elastic, dtype)
            controls = []
            if dtype == "float32":
                say(f"{dtype}: {CONTROLS} controls")
                controls = [_control(words(folder, folder / "control", dtype), seed) for seed in range(CONTROLS)]
            found.append(Comparison(dtype, _read(straight), _read(elastic), controls, sizes))
    return found


def words(folder: Path, output: Path, dtype: str) -> list[str]:
    """A run of `STEPS` steps on the digits."""
    return [
        "configs/quickstart.yaml",
        f"data.path={folder}/digits/train",
        "data.test_path=null",
        f"output={output}",
        "device=cpu",
        "data.threads=1",
        "model.projector=[64, 64]",
        f"precision.dtype={dtype}",
        "precision.autocast=off",
        "train.global_batch=32",
        f"train.stop_after_steps={STEPS}",
        "tracking.log_every_steps=1",
        "tracking.system_metrics=false",
        "knn.every_epochs=null",
        "checkpoint.commit_steps=5",
    ]


def come_and_go(folder: Path, output: Path, dtype: str) -> dict[int, int]:
    """Two workers, of which one is killed; two more join, on one host; a host is taken away. The workers from each step
    on.
    """
    job = ElasticLaunch(words(folder, output, dtype), folder / f"{dtype}-hosts", HOSTS[:2])
    job.step(STEPS // 8)
    os.kill(workers_of(output, "HOROVOD_HOSTNAME")[HOSTS[1]], signal.SIGKILL)
    job.until("elastic: 1 workers from step")
    job.step(job.last_step + STEPS // 16)
    job.set_hosts([HOSTS[0], f"{HOSTS[2]}:2"])
    job.until("elastic: 3 workers from step")
    job.step(job.last_step + STEPS // 8)
    job.set_hosts([f"{HOSTS[2]}:2"])
    job.until("elastic: 2 workers from step")
    assert job.end() == 0, job.text[-3000:]
    changes = [line.split() for _, line in job.lines if line.startswith("elastic: ") and "workers from step" in line]
    return {0: 2} | {int(line[5].rstrip(";,.")): int(line[1]) for line in changes}


def _read(output: Path) -> Curve:
    losses = losses_of(output)
    newest = checkpoint.find(output, "auto")
    assert newest is not None and sorted(losses) == list(range(1, STEPS + 1))
    return Curve(np.array([losses[step] for step in sorted(losses)]), _flat(checkpoint.load(newest)["model"]))


def _control(arguments: list[str], seed: int) -> Curve:
    """One worker, in this process, whose samples are permuted within each batch."""
    made = config.load(arguments[0], arguments[1:])
    source, plan = pretraining.check(made)
    run = pretraining.build(made, workers.start(), torch.device("cpu"), source, plan)
    order = torch.Generator().manual_seed(seed)
    losses = []
    with training.open_loader(run) as loader:
        for y1, y2, _ in loader:
            permuted = torch.randperm(len(y1), generator=order)
            losses.append(float(training.train_step(run, y1[permuted], y2[permuted]).terms.loss))
    run.gradients.close()
    return Curve(np.array(losses), _flat(run.model.state_dict()))


def _flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in state.values() if value.is_floating_point()])


def table(found: list[Comparison]) -> str:
    """In Markdown: how far the elastic run's loss and state are from the straight run's, and the controls'."""
    lines = [
        "| type | loss, elastic | loss, most of the controls | weights, elastic | weights, most of the controls |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        values = (row.drift[-1], row.band[-1], row.apart, row.controls_apart)
        lines.append(f"| {row.dtype} | " + " | ".join(f"{value:.1e}" if value else "" for value in values) + " |")
    return "\n".join(lines)


def figure(found: list[Comparison], path: Path) -> None:
    """The curves over each other, the workers there were, and how far the curves are apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(picture)
    top, middle, bottom = picture.subplots(3, 1, sharex=True, height_ratios=(3, 1, 3))
    steps = np.arange(1, STEPS + 1)
    float32 = found[-1]
    top.plot(steps, float32.straight.losses, color="black", linewidth=3, alpha=0.35, label="one worker")
    top.plot(steps, float32.elastic.losses, color="tab:red", linewidth=1, label="workers come and go")
    top.set(yscale="log", ylabel="loss (float32)")
    top.legend()
    for row, colour in zip(found, ("tab:blue", "tab:red"), strict=True):
        where = [*row.workers, STEPS]
        middle.step(where, [*row.workers.values(), list(row.workers.values())[-1]], where="post", color=colour)
        if row.controls:
            bottom.fill_between(steps, 1e-18, np.maximum(row.band, 1e-18), color=colour, alpha=0.2, linewidth=0)
        bottom.plot(steps, np.maximum(row.drift, 1e-18), color=colour, label=row.dtype)
    middle.set(ylabel="workers", yticks=(1, 2, 3), ylim=(0.5, 3.5))
    bottom.set(yscale="log", ylim=(1e-17, 1), xlabel="step", ylabel="largest relative difference so far")
    bottom.set_title("loss against one worker's; shaded: one worker with permuted batches, float32", fontsize=9)
    bottom.legend()
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
