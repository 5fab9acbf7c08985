"""Break runs in the ways clusters do, let them recover as a user would, and compare with a run nothing happened to.

Each fault is done to real processes (`./run.sh pretrain` with two workers on generated digits). Recovery is the same
command again, where the run does not go on by itself. A result is wrong if the weights, a step's loss, the samples or
the record in MLflow differ from the untouched run's: on a CPU and the same number of workers, to the last bit.
"""

import contextlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import checkpoint
from pipeline.launching import ROOT
from pipeline.samples import write_digits

STEPS, EVERY = 48, 8  # of the run, and of its checkpoints
PATIENCE = 300.0  # seconds for anything at all


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


class Launch:
    """A running `./run.sh pretrain`, whose lines are kept with the time they came."""

    def __init__(self, words: list[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            ["./run.sh", "pretrain", *words],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, patience: float = PATIENCE) -> float:
        """When a line that matches came.

        Raises:
            RuntimeError: it did not come.
        """
        end = time.monotonic() + patience
        seen = 0
        while time.monotonic() < end:
            over = not self._reader.is_alive()
            for when, line in self.lines[seen:]:
                seen += 1
                if re.search(pattern, line):
                    return when
            if over:
                break
            time.sleep(0.05)
        raise RuntimeError(f"no line {pattern!r} in:\n{self.text[-3000:]}")

    def step(self, at_least: int) -> float:
        """When a step of at least that number was done."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for when, line in list(self.lines):
                if (number := _step(line)) is not None and number >= at_least:
                    return when
            if not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise RuntimeError(f"no step {at_least} in:\n{self.text[-3000:]}")

    @property
    def last_step(self) -> int:
        return max((number for _, line in self.lines if (number := _step(line)) is not None), default=0)

    def end(self, patience: float = PATIENCE) -> int:
        """The exit code.

        Raises:
            RuntimeError: it does not end.
        """
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            raise RuntimeError(f"did not end:\n{self.text[-3000:]}") from None
        self._reader.join(10)
        return code


def _step(line: str) -> int | None:
    match = re.match(r"step (\d+)/", line)
    return int(match[1]) if match else None


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
        first = next((when for when, line in launch.lines if (_step(line) or 0) > resumed), None)
        wrong = self.differences(output) + (code != 0)
        return Outcome(what, None if first is None else first - since, max(0, at - resumed), wrong)

    def differences(self, output: Path) -> int:
        """How many of weights, losses, steps and the record are not the untouched run's."""
        found = state(output)
        return sum(found.get(key) != value for key, value in self.expected.items())


def state(output: Path) -> dict[str, Any]:
    """What must be equal: a checksum of each tensor, every step's loss in the attempt that counts, MLflow's runs."""
    newest = checkpoint.find(output, "auto")
    assert newest is not None, f"{output}: no checkpoint"
    saved = checkpoint.load(newest)
    losses = {}
    for line in (output / "journal.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record.get("metrics", {}):
            losses[record["step"]] = record["metrics"]["loss"]
    runs: Any = None
    if (output / "mlflow.db").exists():
        with sqlite3.connect(output / "mlflow.db") as database:
            runs = database.execute("select status from runs").fetchall()
    return {
        "step": saved["step"],
        "weights": [zlib.crc32(t.contiguous().numpy().tobytes()) for t in saved["model"].values()],
        "losses": losses,
        "runs": runs,
    }


def workers_of(output: Path, by: str = "HOROVOD_RANK") -> dict[str, int]:
    """Process id of each worker on `output`, by its rank at the start, or by another of Horovod's variables."""
    found = subprocess.run(
        ["pgrep", "-f", "--", f"-m pipeline pretrain.*{output}"], capture_output=True, text=True
    ).stdout
    found_by = {}
    for pid in map(int, found.split()):
        with contextlib.suppress(OSError):
            environment = dict(
                pair.split(b"=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in pair
            )
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if by.encode() in environment and b"python" in program:
                found_by[environment[by.encode()].decode()] = pid
    return found_by


# --- The faults: each breaks one run and says what came of it ---------------------------------------------------------


def kill_a_rank(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    launch = Launch(bench.words(output))
    launch.step(rng.randint(2, STEPS - 4))
    rank = rng.choice("01")
    os.kill(workers_of(output)[rank], signal.SIGKILL)
    since = time.monotonic()
    code, at = launch.end(), launch.last_step
    outcome = bench.recover(output, at, since, "the others end, exit 1; started again")
    return outcome._replace(wrong=outcome.wrong + (code != 1))


def kill_the_launcher(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    launch = Launch(bench.words(output))
    launch.step(rng.randint(2, STEPS - 4))
    os.kill(launch.process.pid, signal.SIGKILL)
    since = time.monotonic()
    at = launch.last_step
    while workers_of(output) and time.monotonic() < since + PATIENCE:
        time.sleep(0.2)
    left = len(workers_of(output))
    outcome = bench.recover(output, at, since, "its workers save and end; started again")
    return outcome._replace(wrong=outcome.wrong + left)


def damage(how: str) -> Callable[[Bench, random.Random], Outcome]:
    def fault(bench: Bench, rng: random.Random) -> Outcome:
        output = bench.new_output()
        half = Launch(bench.words(output, f"train.stop_after_steps={3 * EVERY}"))
        half.end()
        newest = max((output / checkpoint.FOLDER).glob("step_*.pt"))
        content = bytearray(newest.read_bytes())
        if how == "cut":
            content = content[: rng.randrange(1, len(content))]
        elif how == "emptied":
            content = bytearray()
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        newest.write_bytes(content)
        since = time.monotonic()
        return bench.recover(output, 3 * EVERY, since, "named, passed over; the one before is used")

    return fault


def sigterm(when: str) -> Callable[[Bench, random.Random], Outcome]:
    def fault(bench: Bench, rng: random.Random) -> Outcome:
        output = bench.new_output()
        launch = Launch(bench.words(output, *(("knn.every_epochs=1",) if when == "an evaluation" else ())))
        if when == "start-up":
            while len(workers_of(output)) < 2 and launch.process.poll() is None:
                time.sleep(0.1)
            time.sleep(rng.random() * 2)
        elif when == "a save":
            launch.step(EVERY - 1)
            end = time.monotonic() + PATIENCE
            while not list((output / checkpoint.FOLDER).glob("*step_*")) and time.monotonic() < end:
                time.sleep(0.001)
        else:
            launch.step(rng.randint(2, STEPS - 6))
        launch.process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        code, at = launch.end(), launch.last_step
        outcome = bench.recover(output, at, since, "saves, exit 75; started again")
        return outcome._replace(wrong=outcome.wrong + (code != 75))

    return fault


def read_only_output(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    output.write_text("a file where the folder should be: root may write anywhere else")
    since = time.monotonic()
    launch = Launch(bench.words(output))
    code = launch.end()
    named = str(output) in launch.text
    output.unlink()
    return Outcome(
        "refused in one line before anything starts, exit 2", time.monotonic() - since, 0, (code != 2) + (not named)
    )


def stalled_rank(bench: Bench, rng: random.Random) -> Outcome:
    """SIGSTOP: the process is there and does nothing, like one that hangs in a driver."""
    output = bench.new_output()
    launch = Launch(
        bench.words(output),
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"},
    )
    launch.step(rng.randint(2, STEPS - 4))
    rank = rng.choice("01")
    stopped = workers_of(output)[rank]
    os.kill(stopped, signal.SIGSTOP)
    since = time.monotonic()
    try:
        code = launch.end(120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    outcome = bench.recover(output, launch.last_step, since, "named, the job ends; started again")
    return outcome._replace(wrong=outcome.wrong + (code == 0))


def data_gone(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    copy = bench.folder / f"digits-{output.name}"
    shutil.copytree(bench.folder / "digits", copy)
    launch = Launch(bench.words(output, f"data.path={copy}/train"))
    launch.step(rng.randint(2, STEPS // 2))
    copy.rename(copy.with_suffix(".away"))
    since = time.monotonic()
    code = launch.end()
    named = launch.text.splitlines()[-1].startswith("error: data.path: '")
    copy.with_suffix(".away").rename(copy)
    what = "a file is named, all save and end, exit 2; started again"
    outcome = bench.recover(output, launch.last_step, since, what, f"data.path={copy}/train")
    return outcome._replace(wrong=outcome.wrong + (code != 2) + (not named))


class _Server(http.server.BaseHTTPRequestHandler):
    """A tracking server that answers everything with 500."""

    def do_GET(self) -> None:
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PATCH = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def _broken_server(how: str) -> Iterator[str]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        if how == "black hole":
            probe.listen(128)  # takes connections, never answers
            yield f"http://127.0.0.1:{port}"
            return
    if how == "refused":
        yield f"http://127.0.0.1:{port}"
        return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{port}"
    server.shutdown()


def no_server(how: str) -> Callable[[Bench, random.Random], Outcome]:
    """A server that cannot be used for the whole run; then everything is sent to a store that can."""

    def fault(bench: Bench, rng: random.Random) -> Outcome:
        output = bench.new_output()
        with _broken_server(how) as uri:
            launch = Launch(bench.words(output, f"tracking.uri={uri}"))
            code = launch.end()
        position = json.loads((output / "tracking.json").read_text())
        position |= {"uri": f"sqlite:///{output}/mlflow.db", "run_id": None, "offset": position["begin"], "sent": {}}
        (output / "tracking.json").write_text(json.dumps(position))
        since = time.monotonic()
        sent = subprocess.run(["./run.sh", "sync-tracking", str(output)], cwd=ROOT, capture_output=True, check=False)
        wrong = bench.differences(output) + (code != 0) + (sent.returncode != 0)
        return Outcome("trains on; sync-tracking sends it all", time.monotonic() - since, 0, wrong)

    return fault


FAULTS: dict[str, Callable[[Bench, random.Random], Outcome]] = {
    "kill -9 of a rank": kill_a_rank,
    "kill -9 of the launcher": kill_the_launcher,
    "newest checkpoint cut": damage("cut"),
    "newest checkpoint emptied": damage("emptied"),
    "a bit of it flipped": damage("flipped"),
    "output cannot be written": read_only_output,
    "SIGTERM at start-up": sigterm("start-up"),
    "SIGTERM in a step": sigterm("a step"),
    "SIGTERM in a save": sigterm("a save"),
    "SIGTERM in an evaluation": sigterm("an evaluation"),
    "MLflow refuses": no_server("refused"),
    "MLflow never answers": no_server("black hole"),
    "MLflow answers 500": no_server("500"),
    "a rank hangs": stalled_rank,
    "the images vanish": data_gone,
}


def run(names: list[str], times: dict[str, int]) -> Iterator[Row]:
    """Do each fault `times[name]` (1) times, with seeds 0, 1, ..."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for name in names:
            found = [FAULTS[name](bench, random.Random(seed)) for seed in range(times.get(name, 1))]
            seconds = sorted(o.seconds for o in found if o.seconds is not None)
            yield Row(
                name,
                len(found),
                found[0].what,
                seconds[len(seconds) // 2] if seconds else None,
                sorted(o.steps_lost for o in found)[len(found) // 2],
                sum(o.wrong for o in found),
            )


def table_line(row: Row) -> str:
    seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
    return f"| {row.fault} | {row.times} | {row.what} | {seconds} | {row.steps_lost:g} | {row.wrong} |"


HEADER = "| fault | times | what happens | seconds | steps lost | wrong results |\n|---|---|---|---|---|---|"
