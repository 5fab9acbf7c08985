"""The faults themselves: each breaks one run of a `Bench` in one way, lets it recover, and says what came of it."""

import contextlib
import http.server
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipeline import checkpoint
from pipeline.faults import COMMIT, EVERY, PER_EPOCH, ROUNDING, STEPS, Bench, Fault, NotHere, Outcome, losses_of, state
from pipeline.launching import ROOT, starter
from pipeline.watched_jobs import PATIENCE, ElasticLaunch, Launch, step_of, workers_of


def kill_a_rank(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    launch = Launch(bench.words(output))
    launch.step(rng.randint(2, STEPS - 4))
    rank = rng.choice("01")
    os.kill(workers_of(output)[rank], signal.SIGKILL)
    since = time.monotonic()
    code, at = launch.end(), launch.last_step
    outcome = bench.recover(output, at, since, "the others end, exit 1; started again")
    blamed = f"error: rank {rank} was ended by SIGKILL" in launch.lines[-1][1]
    return outcome._replace(wrong=outcome.wrong + (code != 1) + (not blamed))


def kill_the_launcher(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    launch = Launch(bench.words(output))
    launch.step(rng.randint(2, STEPS // 2))
    os.kill(launch.process.pid, signal.SIGKILL)
    since = time.monotonic()
    at = launch.last_step
    while workers_of(output) and time.monotonic() < since + PATIENCE:
        time.sleep(0.2)
    left = len(workers_of(output))
    outcome = bench.recover(output, at, since, "its workers save and end; started again")
    return outcome._replace(wrong=outcome.wrong + left)


def kill_in_a_save(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    launch = Launch(bench.words(output))
    launch.step(EVERY * rng.randint(1, STEPS // EVERY - 2) - 1)
    rank_0 = workers_of(output)["0"]
    _until_saving(output)
    os.kill(rank_0, signal.SIGKILL)
    since = time.monotonic()
    code, at = launch.end(), launch.last_step
    outcome = bench.recover(output, at, since, "what was half written is dropped; started again")
    return outcome._replace(wrong=outcome.wrong + (code != 1))


def _until_saving(output: Path) -> None:
    """Until the next file of a checkpoint is begun."""
    folder, end = output / checkpoint.FOLDER, time.monotonic() + PATIENCE
    saved = set(folder.glob("*"))
    while set(folder.glob("*")) <= saved and time.monotonic() < end:
        time.sleep(0.0005)


def damage(how: str) -> Fault:
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


def sigterm(when: str) -> Fault:
    def fault(bench: Bench, rng: random.Random) -> Outcome:
        output, evaluates = bench.new_output(), when == "an evaluation"
        more = (f"data.test_path={bench.folder}/digits/test", "knn.every_epochs=1") if evaluates else ()
        launch = Launch(bench.words(output, *more))
        if when == "start-up":
            while len(workers_of(output)) < 2 and launch.process.poll() is None:
                time.sleep(0.1)
            time.sleep(rng.random() * 2)
        elif when == "a save":
            launch.step(EVERY - 1)
            _until_saving(output)
        elif evaluates:
            launch.step(PER_EPOCH)
            time.sleep(rng.random() / 10)
        else:
            launch.step(rng.randint(2, STEPS - 6))
        launch.process.send_signal(signal.SIGTERM)
        since = time.monotonic()
        code, at = launch.end(), launch.last_step
        in_time = not evaluates or any(seen > since and line.startswith("kNN accuracy") for seen, line in launch.lines)
        outcome = bench.recover(output, at, since, "saves, exit 75; started again", *more)
        return outcome._replace(wrong=outcome.wrong + (code != 75) + (not in_time))

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
        bench.words(output, "checkpoint.stop_seconds=10"),  # it hears no SIGTERM, and the launcher waits in vain
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


def no_server(how: str) -> Fault:
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


def full_disk(bench: Bench, rng: random.Random) -> Outcome:
    """The output on a file system of its own, on which another fills up every byte for some steps."""
    output = bench.new_output()
    output.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", output], capture_output=True)
    if mounted.returncode:
        raise NotHere("needs the right to mount a file system (root)")
    try:
        launch = Launch(bench.words(output))
        launch.step(rng.randint(2, EVERY - 2))
        filler = output / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        launch.step(EVERY + 3)
        filler.unlink()
        since = time.monotonic()
        code = launch.end()
        wrong = bench.differences(output) + (code != 0) + (f"by step: {EVERY} (" not in launch.text)
        kept = sorted(int(file.stem.split("_")[1]) for file in (output / checkpoint.FOLDER).glob("step_*.pt"))
        wrong += EVERY in kept
        first = next(when for when, line in launch.lines if when > since and line.startswith("step "))
        return Outcome("one checkpoint is missing, said; trains on", max(0.0, first - since), 0, wrong)
    finally:
        subprocess.run(["umount", "-l", output], check=True)


def nan_on_one_rank(bench: Bench, rng: random.Random) -> Outcome:
    output = bench.new_output()
    at = rng.randint(2, STEPS - 4)
    program = f"import sys; from pipeline.fault_kinds import spoilt_worker; sys.exit(spoilt_worker({at}, sys.argv[1:]))"
    words = bench.words(output)[:-2]  # without -np 2
    command = [*starter(2), sys.executable, "-c", program, "pretrain"]
    launch = Launch(words, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, command)
    code = launch.end()
    losses, found = losses_of(output), state(output)
    wrong = (code != 0) + sum(losses[step] != bench.expected["losses"][step] for step in range(1, at))
    wrong += not (output / "non_finite" / f"step_{at}.json").is_file()
    for file in (output / checkpoint.FOLDER).glob("step_*.pt"):
        values = checkpoint.load(file)["model"].values()
        wrong += not all(bool(torch.isfinite(value).all()) for value in values)
    wrong += found["step"] != STEPS
    shown = [(when, number) for when, line in launch.lines if (number := step_of(line)) is not None]
    since = max(when for when, number in shown if number < at)
    first = min(when for when, number in shown if number > at)
    return Outcome("all leave the step out; the sample is named", first - since, 1, wrong)


def spoilt_worker(at: int, words: list[str]) -> int:
    """A worker; on rank 1 a pixel of step `at` is not a number."""
    from pipeline import stopping

    stopping.hear()
    stopping.block()
    from pipeline import training
    from pipeline.__main__ import main

    train_step = training.train_step

    def spoilt(run: Any, y1: torch.Tensor, y2: torch.Tensor) -> Any:
        if run.step == at - 1 and run.world.rank == 1:
            y1 = y1.clone()
            y1[0, 0, 0, 0] = float("nan")
        return train_step(run, y1, y2)

    training.train_step = spoilt
    return main(words)


def host_lost(bench: Bench, rng: random.Random) -> Outcome:
    """In elastic mode: a host goes, with what ran on it; later it is back."""
    output = bench.new_output()
    hosts = ["localhost", "127.0.0.1"]
    words = bench.words(output, "precision.dtype=float64", f"checkpoint.commit_steps={COMMIT}")
    words = [word for word in words if word not in ("-np", "2")]
    job = ElasticLaunch([*words, "--blacklist-cooldown-range", "1", "2"], bench.folder / f"{output.name}-hosts", hosts)
    job.step(rng.randint(EVERY, STEPS // 3))
    at = job.last_step
    os.kill(workers_of(output, "HOROVOD_HOSTNAME")[hosts[1]], signal.SIGKILL)
    since = time.monotonic()
    job.set_hosts(hosts[:1])
    job.until("elastic: 1 workers from step")
    recovered = job.step(1)
    resumed = next(int(line.split()[5]) for _, line in job.lines if line.startswith("elastic: 1 workers from step"))
    job.set_hosts(hosts)
    job.until("elastic: 2 workers from step")
    code = job.end()
    expected = bench.float64_losses()
    found = losses_of(output)
    wrong = (code != 0) + sum(abs(found[step] / expected[step] - 1) > ROUNDING for step in range(1, STEPS + 1))
    return Outcome("goes on without it, and with it again", recovered - since, max(0, at - resumed), wrong)


def server_killed(bench: Bench, rng: random.Random) -> Outcome:
    """A real MLflow server that is killed in the run and is back before its end."""
    output = bench.new_output()
    folder = bench.folder / f"{output.name}-server"
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    server = _mlflow_server(folder, port)
    try:
        launch = Launch(bench.words(output, f"tracking.uri={uri}"))
        launch.step(rng.randint(2, STEPS // 2))
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        launch.step(launch.last_step + 8)
        server = _mlflow_server(folder, port)
        since = time.monotonic()
        code = launch.end()
        with sqlite3.connect(folder / "server.db") as database:
            stored = database.execute("select step, value from metrics where key = 'loss'").fetchall()
            runs = database.execute("select status from runs").fetchall()
        wrong = (code != 0) + (sorted(stored) != sorted(losses_of(output).items())) + (runs != [("FINISHED",)])
        wrong += bench.differences(output, runs=False)
        return Outcome("trains on; the server gets each point once", time.monotonic() - since, 0, wrong)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _mlflow_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A server that answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/files"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with open(folder / "server.log", "ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return server
        time.sleep(0.1)
    raise RuntimeError(f"no server: {(folder / 'server.log').read_text()[-2000:]}")


FAULTS: dict[str, Fault] = {
    "kill -9 of a rank": kill_a_rank,
    "kill -9 of the launcher": kill_the_launcher,
    "kill -9 in a save": kill_in_a_save,
    "newest checkpoint cut": damage("cut"),
    "newest checkpoint emptied": damage("emptied"),
    "a bit of it flipped": damage("flipped"),
    "the disk is full": full_disk,
    "output cannot be written": read_only_output,
    "SIGTERM at start-up": sigterm("start-up"),
    "SIGTERM in a step": sigterm("a step"),
    "SIGTERM in a save": sigterm("a save"),
    "SIGTERM in an evaluation": sigterm("an evaluation"),
    "a host is lost, and is back": host_lost,
    "MLflow is killed, and is back": server_killed,
    "MLflow refuses": no_server("refused"),
    "MLflow never answers": no_server("black hole"),
    "MLflow answers 500": no_server("500"),
    "a rank hangs": stalled_rank,
    "NaN on one rank": nan_on_one_rank,
    "the images vanish": data_gone,
}
