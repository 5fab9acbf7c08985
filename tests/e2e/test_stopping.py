"""Runs that are stopped, fail, or are started again: what they leave, and what they say."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import launching
from pipeline.config import load
from pipeline.samples import write_digits
from tests.e2e.deaf import deaf

ROOT = Path(__file__).parents[2]
SHORT = ["train.global_batch=64", "train.epochs=5", "schedule.warmup_epochs=1"]  # 90 steps
COMMON = ["configs/quickstart.yaml", "model.projector=[64, 64]", "tracking.log_every_steps=1", "knn.every_epochs=null"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "digits")
    return folder / "digits" / "train"


def run_two(program, words):
    """Two workers of a program of ours that misbehaves, by the launcher's own means: its exit code."""
    config = load(COMMON[0], [*COMMON[1:], *words])
    command = [*launching.starter(2), sys.executable, str(ROOT / program), "pretrain", *COMMON, *words]
    environment = launching.environment_of_job(config) | {"OMP_NUM_THREADS": "1"}
    return launching.run_filtered(command, environment, config.output_path)


def launch(*words, by=("./run.sh",)):
    return subprocess.Popen(
        [*by, "pretrain", *COMMON, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=deaf,
    )


def signal_after(process, number, step, patience=240):
    """Send the signal once the run has shown `step`; returns (exit code, all output)."""
    lines, sent = [], False
    watchdog = threading.Timer(patience, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    for line in process.stdout:
        lines.append(line)
        if not sent and number is not None and line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step:
            process.send_signal(number)
            sent = True
    code = process.wait()
    watchdog.cancel()
    return code, "".join(lines)


def statuses(output):
    with sqlite3.connect(output / "mlflow.db") as database:
        return [status for (status,) in database.execute("select status from runs")]


def no_worker_is_left(output):
    for _ in range(50):
        found = subprocess.run(["pgrep", "-f", f"pipeline pretrain.*{output}"], capture_output=True, text=True).stdout
        if not found:
            return True
        time.sleep(0.2)
    return False


def test_a_run_survives_sigterm_and_ctrl_c_and_goes_on_as_one(digits, tmp_path):
    """75 and 130 though horovodrun says 1; the same MLflow run, and no step lost or done twice.

    Its last part is done by plain horovodrun: the same workers, without our launcher.
    """
    output = tmp_path / "out"
    alone = [f"data.path={digits}", "data.test_path=null", f"output={output}", *SHORT]
    words = [*alone, "-np", "2"]
    code, shown = signal_after(launch(*words), signal.SIGTERM, 5)
    assert code == 75, shown[-3000:]
    assert statuses(output) == ["KILLED"] and no_worker_is_left(output)
    stopped = json.loads((output / "summary.json").read_text())
    assert stopped["step"] >= 5 and not stopped["finished"]
    code, shown = signal_after(launch(*words), signal.SIGINT, stopped["step"] + 5)
    assert code == 130, shown[-3000:]
    assert f"resuming at step {stopped['step']}" in shown and statuses(output) == ["KILLED"]
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    plain = launch(*alone, by=(horovodrun, "-np", "2", sys.executable, "-m", "pipeline"))
    code, shown = signal_after(plain, None, 0)
    assert code == 0, shown[-3000:]
    assert statuses(output) == ["FINISHED"]
    steps = [
        line["step"]
        for line in map(json.loads, (output / "journal.jsonl").read_text().splitlines())
        if "loss" in line.get("metrics", {})
    ]
    assert steps == list(range(1, 91))
    code, shown = signal_after(launch(*words), None, 0)
    assert code == 2 and "is complete (step 90)" in shown.splitlines()[-1]
    assert statuses(output) == ["FINISHED"]


def test_a_picture_that_cannot_be_decoded_is_the_last_line(tmp_path):
    """Case 2: all workers save and end, whichever of them met it; it is the user's to mend, hence 2."""
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    for number in range(64):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    (folder / "33.png").write_bytes((folder / "33.png").read_bytes()[:60])
    output = tmp_path / "out"
    words = [f"data.path={tmp_path / 'images'}", "data.test_path=null", f"output={output}", "train.global_batch=8"]
    code, shown = signal_after(launch(*words, "-np", "2", "train.epochs=6"), None, 0)
    last = shown.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: data.path: 'a/33.png' cannot be read: "), shown[-3000:]
    assert statuses(output) == ["FAILED"] and no_worker_is_left(output)


def test_the_earliest_error_is_the_last_line_with_its_rank(digits, tmp_path, capfd, monkeypatch):
    """One worker fails, the other then has no partner: the launcher names the first, whichever horovodrun blames."""
    output = tmp_path / "out"
    words = [f"data.path={digits}", "data.test_path=null", f"output={output}", *SHORT, "device=cpu"]
    monkeypatch.chdir(ROOT)
    code = run_two("tests/e2e/fails.py", words)
    shown = capfd.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("error: rank 1 on ") and "ValueError: spoilt" in last, shown.err[-3000:]
    failed = json.loads((output / "errors" / "rank1.json").read_text())
    assert "failing_step" in failed["traceback"] and failed["exit_code"] == 1
    assert statuses(output) == ["FAILED"] and no_worker_is_left(output)
