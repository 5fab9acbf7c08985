"""Stalls and kills: the job ends, says why, and the next one finds an honest folder."""

import json
import sqlite3
import subprocess
import sys
import time

from tests.e2e.test_stopping import (
    COMMON,
    ROOT,
    SHORT,
    digits,  # noqa: F401
    launch,
    no_worker_is_left,
    run_two,
    statuses,
)


def test_a_stalled_rank_ends_the_job_and_is_named(digits, tmp_path, capfd, monkeypatch):  # noqa: F811
    """Case 5, and 29: a save longer than the limit trips nobody; a rank asleep is named, and the run is FAILED."""
    output = tmp_path / "out"
    words = [f"data.path={digits}", "data.test_path=null", f"output={output}", *SHORT]
    words += ["checkpoint.every_steps=2", "train.watchdog_seconds=8", "device=cpu"]
    monkeypatch.chdir(ROOT)
    start = time.monotonic()
    code = run_two("tests/e2e/stalls.py", words)
    shown = capfd.readouterr()
    assert code == 76, shown.out[-2000:] + shown.err[-4000:]
    assert "saved slowly at step 2" in shown.out and time.monotonic() - start < 150
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 on ") and "after step 3: phase step (traceback in" in last, last
    assert "sleepy_step" in json.loads((output / "errors" / "rank1.json").read_text())["traceback"]
    assert statuses(output) == ["FAILED"] and no_worker_is_left(output)
    with sqlite3.connect(output / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags where key like 'error%'"))
    assert tags["error.rank"] == "1" and tags["error"].startswith("no progress for")


def test_a_folder_has_one_owner_and_a_killed_run_does_not_stay_running(digits, tmp_path):  # noqa: F811
    """Cases 14 and 49: a second job is refused, by name; after kill -9 the next start corrects the status."""
    output = tmp_path / "out"
    words = [f"data.path={digits}", "data.test_path=null", f"output={output}", "checkpoint.every_steps=2"]
    words += [*SHORT[:1], "train.epochs=2000", SHORT[2], "loss.lambd=0.1", "device=cpu"]
    worker = [sys.executable, "-m", "pipeline", "pretrain", *COMMON, *words]
    first = subprocess.Popen(worker, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for line in first.stdout:
            if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= 6 and (output / "mlflow.db").exists():
                if statuses(output) == ["RUNNING"]:
                    break
        second = launch(*words)
        shown, _ = second.communicate(timeout=200)
        assert second.returncode == 2 and f"in use by process {first.pid} on" in shown.splitlines()[-1], shown
    finally:
        first.kill()
        first.communicate(timeout=60)
    assert statuses(output) == ["RUNNING"]
    other = subprocess.run([*worker, "loss.lambd=0.2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert other.returncode == 2 and "loss.lambd was 0.1, is 0.2" in other.stderr.splitlines()[-1], other
    assert f"taken over from process {first.pid} on" in other.stdout
    assert statuses(output) == ["KILLED"] and not (output / ".lease").exists()
