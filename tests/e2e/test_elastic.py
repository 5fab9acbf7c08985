"""Workers that die, hosts that come, one that cannot be reached, one that is taken away: one run, as if nothing was."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from pipeline.faults import workers_of
from pipeline.samples import write_digits

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


class Job:
    """`./run.sh pretrain` with hosts that the test changes; all of them are this machine under different names."""

    def __init__(self, tmp_path, arguments, hosts):
        self.hosts = tmp_path / "hosts"
        self.set_hosts(hosts)
        script = tmp_path / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        script.chmod(0o755)
        elastic = ["--min-np", "1", "--max-np", "4", "-np", str(len(hosts)), "--network-interface", "lo"]
        self.process = subprocess.Popen(
            ["./run.sh", "pretrain", *arguments, *elastic, "--host-discovery-script", str(script)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self.watchdog = threading.Timer(400, lambda: os.killpg(self.process.pid, signal.SIGKILL))
        self.watchdog.start()

    def set_hosts(self, names):
        whole = self.hosts.with_suffix(".new")
        whole.write_text("".join(f"{name}:1\n" for name in names))
        whole.rename(self.hosts)

    def until(self, start, after=0):
        """Read on to a line that starts so, and for `step` has a number of at least `after`."""
        for line in self.process.stdout:
            self.lines.append(line)
            print(line, end="")  # pytest shows it all where a test fails
            if line.startswith(start) and (start != "step " or int(line.split()[1].split("/")[0]) >= after):
                return
        raise AssertionError("".join(self.lines)[-4000:])

    def end(self):
        self.lines += list(self.process.stdout)
        self.watchdog.cancel()
        return self.process.wait()

    @property
    def shown(self):
        return "".join(self.lines)


def weights(output):
    newest = max((output / "checkpoints").glob("step_*.pt"))
    state = torch.load(newest, weights_only=True)
    return state["step"], torch.cat([v.flatten().double() for v in state["model"].values() if v.is_floating_point()])


def test_2_1_2_3_2_workers_make_the_run_of_one(digits, tmp_path):
    """Also: an unreachable host costs no step; the record is one run, whose last attempts hold every step once."""
    straight, output = tmp_path / "straight", tmp_path / "elastic"
    done = subprocess.run(
        ["./run.sh", "pretrain", *words(digits, straight), "-np", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    here = socket.gethostname()
    job = Job(tmp_path, words(digits, output), ["localhost", "127.0.0.1"])
    job.until("step ", 12)
    lost_at = time.monotonic()
    os.kill(workers_of(output, "HOROVOD_HOSTNAME")["127.0.0.1"], signal.SIGKILL)
    job.until("elastic: 1 workers from step")
    assert time.monotonic() - lost_at < 60
    job.until("step ", 20)
    job.set_hosts(["localhost", "127.0.0.9"])  # where no ssh answers
    job.until("elastic: 1 workers from step")
    job.set_hosts(["localhost", "127.0.0.9", here])
    job.until("elastic: 2 workers from step")
    job.until("step ", 50)
    job.set_hosts(["localhost"])  # taken away in order: nothing is lost
    job.until("elastic: 1 workers from step")
    assert job.end() == 0, job.shown[-4000:]
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
        assert resets >= 4
    assert not subprocess.run(["pgrep", "-f", f"pipeline pretrain.*{output}"], capture_output=True).stdout


def test_sigterm_to_all_saves_and_the_next_launch_goes_on(digits, tmp_path):
    output = tmp_path / "out"
    job = Job(tmp_path, words(digits, output), ["localhost", "127.0.0.1"])
    job.until("step ", 6)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.shown[-3000:]
    stopped = json.loads((output / "summary.json").read_text())["step"]
    assert 6 <= stopped < STEPS
    job = Job(tmp_path, [*words(digits, output), f"train.stop_after_steps={stopped + 3}"], ["localhost"])
    assert job.end() == 0, job.shown[-3000:]
    assert f"resuming at step {stopped}" in job.shown


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
def test_what_cannot_be_is_refused_in_one_line(digits, tmp_path, arguments, said):
    done = subprocess.run(
        ["./run.sh", "pretrain", *words(digits, tmp_path), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
