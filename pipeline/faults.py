"""Break runs in the ways clusters do, let them recover as a user would, and compare with a run nothing happened to.

Each fault is done to real processes (`./run.sh pretrain` with two workers on generated digits). Recovery is the same
command again, where the run does not go on by itself. A result is wrong if the weights, a step's loss, the samples or
the record in MLflow differ from the untouched run's: on a CPU and the same number of workers, to the last bit.
"""

import json
import random
import re
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import checkpoint
from pipeline.samples import write_digits
from pipeline.watched_jobs import Launch, step_of

STEPS, EVERY = 48, 8  # of the run, and of its checkpoints
PER_EPOCH = 25  # of those steps
COMMIT = 4  # steps between two commits of an elastic run
ROUNDING = 1e-9  # the most, in float64, by which a run on other numbers of workers may differ


class NotHere(Exception):
    """This machine does not let us do this fault; why."""


class Outcome(NamedTuple):
    """`seconds` from the fault to the next new step (or the message, where that is all there can be)."""

    what: str
    seconds: float | None
    steps_lost: int
    wrong: int


class Row(NamedTuple):
    """One fault, done `times` times: medians of the figures, and all wrong results."""

    fault: str
    times: int
    what: str
    seconds: float | None
    steps_lost: float
    wrong: int


class Bench:
    """The data, the untouched run, and a folder for each broken one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_digits(folder / "digits")
        self.reference = folder / "reference"
        code = Launch(self.words(self.reference)).end()
        assert code == 0, "the untouched run failed"
        self.expected = state(self.reference)
        self._count = 0

    def words(self, output: Path, *more: str) -> list[str]:
        """A run of 48 steps with two workers into `output`."""
        return [
            "configs/quickstart.yaml",
            f"data.path={self.folder}/digits/train",
            "data.test_path=null",
            f"output={output}",
            "device=cpu",
            "data.threads=1",
            "model.projector=[64, 64]",
            "train.global_batch=48",
            f"train.stop_after_steps={STEPS}",
            f"checkpoint.every_steps={EVERY}",
            "checkpoint.milestone_epochs=null",
            "knn.every_epochs=null",
            "tracking.log_every_steps=1",
            "tracking.system_metrics=false",
            "-np",
            "2",
            *more,
        ]

    def new_output(self) -> Path:
        self._count += 1
        return self.folder / f"run{self._count}"

    def recover(self, output: Path, at: int, since: float, what: str, *more: str) -> Outcome:
        """The same command again; what was lost between step `at` and where it goes on."""
        launch = Launch(self.words(output, *more))
        code = launch.end()
        match = re.search(r"resuming at step (\d+)", launch.text)
        resumed = int(match[1]) if match else 0
        first = next((when for when, line in launch.lines if (step_of(line) or 0) > resumed), None)
        wrong = self.differences(output) + (code != 0)
        return Outcome(what, None if first is None else first - since, max(0, at - resumed), wrong)

    def differences(self, output: Path, runs: bool = True) -> int:
        """How many of weights, losses, steps and (`runs`) the record are not the untouched run's."""
        found = state(output)
        return sum(found.get(key) != value for key, value in self.expected.items() if runs or key != "runs")

    def float64_losses(self) -> dict[int, float]:
        """An untouched run's in float64, for runs whose number of workers changes: they agree to rounding."""
        output = self.folder / "float64"
        if not output.exists():
            code = Launch(self.words(output, "precision.dtype=float64")).end()
            assert code == 0, "the untouched run in float64 failed"
        return losses_of(output)


def state(output: Path) -> dict[str, Any]:
    """What must be equal: a checksum of each tensor, every step's loss in the attempt that counts; MLflow's runs with
    every point of their loss, once."""
    newest = checkpoint.find(output, "auto")
    assert newest is not None, f"{output}: no checkpoint"
    saved = checkpoint.load(newest)
    runs: Any = None
    if (output / "mlflow.db").exists():
        with sqlite3.connect(output / "mlflow.db") as database:
            runs = database.execute("select status from runs").fetchall()
            query = "select step, value from metrics where key = 'loss' order by step"
            runs.append(database.execute(query).fetchall())
    return {
        "step": saved["step"],
        "weights": [zlib.crc32(t.contiguous().numpy().tobytes()) for t in saved["model"].values()],
        "losses": losses_of(output),
        "runs": runs,
    }


def losses_of(output: Path) -> dict[int, float]:
    """By step, from the journal; of a step done twice, the loss that the surviving weights saw."""
    losses = {}
    for record in map(json.loads, (output / "journal.jsonl").read_text().splitlines()):
        if "loss" in record.get("metrics", {}):
            losses[record["step"]] = record["metrics"]["loss"]
    return losses


Fault = Callable[[Bench, random.Random], Outcome]


def run(faults: Mapping[str, Fault], times: int) -> Iterator[Row]:
    """Do each fault with the seeds 0, 1, ..."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for name, fault in faults.items():
            try:
                found = [_done(fault, bench, seed) for seed in range(times)]
            except NotHere as reason:
                yield Row(name, 0, f"not done: {reason}", None, 0, 0)
                continue
            seconds = sorted(o.seconds for o in found if o.seconds is not None)
            yield Row(
                name,
                len(found),
                found[0].what,
                seconds[len(seconds) // 2] if seconds else None,
                sorted(o.steps_lost for o in found)[len(found) // 2],
                sum(o.wrong for o in found),
            )


def _done(fault: Fault, bench: Bench, seed: int) -> Outcome:
    """What came of it. A job that does not do what it should is a wrong result, and the rest of the table follows."""
    try:
        return fault(bench, random.Random(seed))
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return Outcome("the job did not do what it should", None, 0, 1)


def table_line(row: Row) -> str:
    seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
    return f"| {row.fault} | {row.times} | {row.what} | {seconds} | {row.steps_lost:g} | {row.wrong} |"


HEADER = "| fault | times | what happens | seconds | steps lost | wrong results |\n|---|---|---|---|---|---|"
