"""Workers that die, hosts that come, one that cannot be reached, one that is taken away: one run, as if nothing was."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from pipeline.samples import write_digits
from pipeline.watched_jobs import ElasticLaunch, workers_of

ROOT = Path(__file__).parents[2]
STEPS = 90


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "digits")
    return folder / "digits" / "train"


def words(digits, output):
    return [
        "configs/quickstart.yaml",
        f"data.path={digits}",
        "data.test_path=null",
        f"output={output}",
        "model.projector=[64, 64]",
        "precision.dtype=float64",
        "precision.autocast=off",
        "train.global_batch=32",
        f"train.stop_after_steps={STEPS}",
        "tracking.log_every_steps=1",
        "tracking.system_metrics=false",
        "knn.every_epochs=null",
        "checkpoint.commit_steps=5",
        "data.threads=1",
    ]


def weights(output):
    newest = max((output / "checkpoints").glob("step_*.pt"))
    state = torch.load(newest, weights_only=True)
    return state["step"], torch.cat([v.flatten().double() for v in state["model"].values() if v.is_floating_point()])


def test_2_1_2_3_2_workers_make_the_run_of_one(digits, tmp_path, monkeypatch):
    """Also: hosts that cannot be reached or fail at their start cost no step; SIGTERM to all saves, and the next launch
    goes on; one run, whose last attempts hold every step once.
    """
    straight, output = tmp_path / "straight", tmp_path / "elastic"
    done = subprocess.run(
        ["./run.sh", "pretrain", *words(digits, straight), "-np", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")  # how long the others wait for the newcomer that is killed
    here = socket.gethostname()
    again = ["--blacklist-cooldown-range", "1", "2"]
    job = ElasticLaunch([*words(digits, output), *again], tmp_path, ["localhost", "127.0.0.1"])
    job.step(12)
    lost_at = time.monotonic()
    os.kill(workers_of(output, "HOROVOD_HOSTNAME")["127.0.0.1"], signal.SIGKILL)
    job.set_hosts(["localhost"])
    job.until("elastic: 1 workers from step")
    assert time.monotonic() - lost_at < 60
    job.step(20)
    job.set_hosts(["localhost", "127.0.0.9"])  # where no ssh answers
    job.until("hosts: 127.0.0.9 does not answer ssh")
    job.set_hosts(["localhost", "127.0.0.9", here])
    while here not in workers_of(output, "HOROVOD_HOSTNAME"):
        assert job.process.poll() is None, job.text[-3000:]
        time.sleep(0.1)
    os.kill(workers_of(output, "HOROVOD_HOSTNAME")[here], signal.SIGKILL)
    job.until("elastic: 1 workers from step")
    job.until("elastic: 2 workers from step")
    job.step(40)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.text[-3000:]
    stopped = json.loads((output / "summary.json").read_text())["step"]
    assert 40 <= stopped < STEPS
    job = ElasticLaunch([*words(digits, output), *again], tmp_path, ["localhost", "127.0.0.1"])
    job.step(stopped + 10)
    assert f"resuming at step {stopped}" in job.text
    job.set_hosts(["localhost"])  # taken away in order: nothing is lost
    job.until("elastic: 1 workers from step")
    assert job.end() == 0, job.text[-4000:]
    step, found = weights(output)
    expected_step, expected = weights(straight)
    assert step == expected_step == STEPS
    assert float((found - expected).norm() / expected.norm()) < 1e-9
    losses = {}
    for line in map(json.loads, (output / "journal.jsonl").read_text().splitlines()):
        if "loss" in line.get("metrics", {}):
            losses[line["step"]] = line["metrics"]["loss"]  # of the attempt that the weights come from: the last
    for line in map(json.loads, (straight / "journal.jsonl").read_text().splitlines()):
        if "loss" in line.get("metrics", {}):
            assert losses[line["step"]] == pytest.approx(line["metrics"]["loss"], rel=1e-9)
    assert sorted(losses) == list(range(1, STEPS + 1))
    with sqlite3.connect(output / "mlflow.db") as database:
        assert database.execute("select count(*), min(status) from runs").fetchall() == [(1, "FINISHED")]
        sizes = database.execute("select value from metrics where key = 'world_size' order by step, timestamp")
        assert {int(value) for (value,) in sizes} == {1, 2}
        resets = database.execute("select max(value) from metrics where key = 'elastic_resets'").fetchone()[0]
        assert resets >= 3
    assert not subprocess.run(["pgrep", "-f", f"pipeline pretrain.*{output}"], capture_output=True).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-np", "2"], "--min-np"),
        (["--blacklist-cooldown-range", "10", "20"], "--min-np"),
        (["--min-np", "3", "--max-np", "2", "-H", "localhost:4"], "must rise"),
        (["--min-np", "1"], "--host-discovery-script"),
        (["--min-np", "1", "--host-discovery-script", "/no/such/file"], "/no/such/file"),
        (["--min-np", "1", "--max-np", "64", "-H", "localhost:64"], "--max-np 64"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(digits, tmp_path, arguments, said, capfd):
    assert main(["launch", *words(digits, tmp_path), *arguments]) == 2
    shown = capfd.readouterr().err
    assert said in shown and shown.count("\n") == 1
