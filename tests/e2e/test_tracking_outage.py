"""A tracking server that is away, comes back, or never answers; two jobs on one new store; kills. Real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from pipeline import journal
from pipeline.config import Config
from pipeline.tracking import Tracker, sync
from tests.e2e.deaf import deaf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def output(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def mlflow_server(folder, port):
    """A real server; killed at the end with all its processes."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/files"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with open(folder / "server.log", "a") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.1)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def start(output, uri):
    return Tracker.start(Config(tracking={"uri": uri, "system_metrics": False}), output)


def wait_for(condition, seconds):
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "did not happen in time"
        time.sleep(0.05)


def everything_once(uri, run_id, output):
    """The run's points equal the journal's: each step once, with its own time."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    kept = [
        (r.body["step"], r.body["metrics"]["loss"], r.time)
        for r in journal.read(output / "journal.jsonl")
        if r.kind == "metrics"
    ]
    stored = client.get_metric_history(run_id, "loss")
    assert [(m.step, m.value, m.timestamp) for m in stored] == kept
    run = client.get_run(run_id)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    return run, client


def test_server_away_at_start_killed_and_back(output, tmp_path, caplog):
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    longest = 0.0

    def log(step):
        nonlocal longest
        began = time.monotonic()
        tracker.log(step, {"loss": 1 / (1 + step)})
        longest = max(longest, time.monotonic() - began)

    began = time.monotonic()
    tracker = start(output, uri)
    assert time.monotonic() - began < 1
    for step in range(3):
        log(step)
    wait_for(lambda: "does not take metrics" in caplog.text, 10)
    tracker.image(2, "views", np.zeros((9, 9, 3), np.uint8))
    with mlflow_server(tmp_path, port):
        wait_for(lambda: tracker.unsent == 0, 60)
        log(3)
        time.sleep(1.5)
    for step in range(4, 12):
        log(step)
        time.sleep(0.1)
    with mlflow_server(tmp_path, port):
        log(12)
        tracker.end("FINISHED", timeout=60)
        run, client = everything_once(uri, tracker.run_id, output)
        assert run.info.status == "FINISHED"
        first = next(journal.read(output / "journal.jsonl"))
        assert run.info.start_time == first.body["began"]
        assert len(client.list_artifacts(tracker.run_id, "images")) == 2
        assert [a.path for a in client.list_artifacts(tracker.run_id)] == ["config.yaml", "images"]
    assert longest < 1
    assert caplog.text.count("does not take metrics") == 1


class Answers500(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def trouble(kind):
    """Something that is no MLflow: yields its port."""
    if kind == "dead":
        yield free_port()
    elif kind == "black hole":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            yield listener.getsockname()[1]
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers500)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("kind", ["dead", "black hole", "500"])
def test_trouble_costs_a_warning_and_is_made_good_later(kind, output, tmp_path, caplog):
    with trouble(kind) as port:
        uri = f"http://127.0.0.1:{port}"
        tracker = start(output, uri)
        for step in range(200):
            began = time.monotonic()
            tracker.log(step, {"loss": float(step)})
            assert time.monotonic() - began < 1
        wait_for(lambda: "does not take metrics" in caplog.text, 10)
        began = time.monotonic()
        tracker.end("KILLED", timeout=3)
        assert time.monotonic() - began < 4
        assert caplog.text.count("does not take metrics") == 1
        assert f"./run.sh sync-tracking {output}" in caplog.text
        assert tracker.run_id is None
        wait_for(lambda: all(t.name != "tracking-sender" for t in threading.enumerate()), 30)
    if kind != "black hole":
        return  # the rest is the same for all, and costs a server
    with mlflow_server(tmp_path, port):
        command = [sys.executable, "-m", "pipeline", "sync-tracking", str(output)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{output}: everything is in MLflow\n"), done.stderr
        run_id = json.loads((output / "tracking.json").read_text())["run_id"]
        assert everything_once(uri, run_id, output)[0].info.status == "KILLED"


# One run for each store named, begun when `others` jobs more are as far; killed by itself at the end, or finished.
JOB = """
import os, sys, time
from pathlib import Path
from pipeline.config import Config
from pipeline.tracking import Tracker
output, others, how, *uris = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
for number, uri in enumerate(uris):
    folder = output / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (output.parent / f"ready-{number}-{output.name}").touch()
    while len(list(output.parent.glob(f"ready-{number}-*"))) <= others:
        time.sleep(0.001)
    config = Config(name=output.name, tracking={"uri": uri, "system_metrics": False})
    tracker = Tracker.start(config, folder)
    for step in range(5):
        tracker.log(step, {"loss": float(step)})
    if how == "die":
        while tracker.unsent:
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
    tracker.end("FINISHED", timeout=120)
"""


def job(output, uris, others=0, how="finish"):
    command = [sys.executable, "-c", JOB, str(output), str(others), how, *uris]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def runs_in(uri):
    import mlflow

    client = mlflow.MlflowClient(uri)
    return client, client.search_runs([client.get_experiment_by_name("barlow-twins").experiment_id])


def test_two_jobs_make_a_new_store_in_the_same_second_five_times(tmp_path):
    uris = [f"sqlite:///{tmp_path}/shared-{number}.db" for number in range(5)]
    jobs = [job(tmp_path / name, uris, others=1) for name in ("one", "two")]
    errors = [process.communicate(timeout=300)[1] for process in jobs]
    assert [process.returncode for process in jobs] == [0, 0], errors
    assert not any("tracking:" in error for error in errors), errors
    for uri in uris:
        client, runs = runs_in(uri)
        assert sorted((r.info.run_name, r.info.status) for r in runs) == [("one", "FINISHED"), ("two", "FINISHED")]
        for run in runs:
            assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == list(range(5))


def test_killed_run_goes_on_as_the_same_run(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    process = job(tmp_path / "out", [uri], how="die")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert [r.info.status for r in runs_in(uri)[1]] == ["RUNNING"]
    process = job(tmp_path / "out", [uri])
    process.communicate(timeout=120)
    assert process.returncode == 0
    client, runs = runs_in(uri)
    assert [r.info.status for r in runs] == ["FINISHED"]
    assert [m.step for m in client.get_metric_history(runs[0].info.run_id, "loss")] == list(range(5))
    assert runs[0].data.tags["attempt"] == "2"


def test_a_second_sender_is_kept_away(output):
    tracker = Tracker.start(Config(tracking={"system_metrics": False}), output)
    wait_for(lambda: tracker.run_id is not None, 60)
    assert not sync(output, patience=1)
    tracker.end("FINISHED")
    assert sync(output)


def test_ui_serves_the_run_and_ends_cleanly(output):
    tracker = Tracker.start(Config(tracking={"system_metrics": False}), output)
    tracker.log(1, {"loss": 0.5})
    tracker.image(1, "views", np.full((9, 9, 3), 7, np.uint8))
    tracker.end("FINISHED", timeout=60)
    port = free_port()
    command = [sys.executable, "-m", "pipeline", "ui", str(output), "--port", str(port)]
    silence = subprocess.DEVNULL
    ui = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=silence, text=True, preexec_fn=deaf)
    try:
        line = ui.stdout.readline()
        assert f"http://127.0.0.1:{port}" in line and str(output) in line

        def get(path):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30).read()

        run = json.loads(get(f"/api/2.0/mlflow/runs/get?run_id={tracker.run_id}"))["run"]
        assert {m["key"]: m["value"] for m in run["data"]["metrics"]} == {"loss": 0.5}
        listed = json.loads(get(f"/api/2.0/mlflow/artifacts/list?run_id={tracker.run_id}&path=images"))["files"]
        picture = next(f["path"] for f in listed if f["path"].endswith(".png"))
        local = (output / "images/views/step_00000001.png").read_bytes()
        quoted = picture.replace("+", "%2B")
        assert get(f"/get-artifact?run_id={tracker.run_id}&path={quoted}") == local
        ui.send_signal(signal.SIGINT)
        assert ui.wait(timeout=20) == 0
    finally:
        ui.kill()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.parametrize(
    "words, said",
    [
        (["ui", "OUT"], "no run was tracked here"),
        (["ui"], "holds no tracked run"),
        (["sync-tracking", "OUT"], "no run was recorded here"),
        (["sync-tracking"], "give the output folder"),
    ],
)
def test_nothing_there_is_said_in_one_line(words, said, output):
    words = [str(output) if word == "OUT" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=output, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
