import logging
import re
import shutil
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from dali.errors import InputError
from pipeline import host_metrics, journal, mlflow_store, sender
from pipeline.config import Config
from pipeline.tracking import Tracker, flatten, sync, tracking_uri


@pytest.fixture
def output(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "out"
    folder.mkdir()
    shutil.copyfile(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture
def client(output):
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{output}/mlflow.db")


def start(output, config=None, **more):
    config = config or Config(tracking={"system_metrics": False})
    return Tracker.start(config, output, **more)


def history(client, run_id, key):
    return [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, key)]


def journalled(output, key):
    """(attempt, step, value, time) of each value of a metric in the journal."""
    return [
        (r.attempt, r.body["step"], r.body["metrics"][key], r.time)
        for r in journal.read(output / "journal.jsonl")
        if r.kind == "metrics" and key in r.body["metrics"]
    ]


def test_one_run_holds_what_was_logged(output, client):
    began = time.monotonic()
    tracker = start(output, facts={"world_size": 3, "version": {"torch": "2"}})
    assert time.monotonic() - began < 1  # the import of mlflow alone takes longer
    for step in (5, 10):
        tracker.log(step, {"loss": 1 / step, "lr/weights": np.float32(0.5)})
    picture = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    tracker.image(10, "views", picture)
    tracker.tag("note", "seen")
    tracker.end("FINISHED")

    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len(runs) == 1
    run = runs[0]
    assert run.info.run_id == tracker.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "pretrain")
    assert client.get_experiment(run.info.experiment_id).name == "barlow-twins"
    assert run.data.params["optimizer.lr_weights"] == "0.2"
    assert run.data.params["model.projector"] == "[8192, 8192, 8192]"
    assert run.data.tags.items() >= {"world_size": "3", "version.torch": "2", "note": "seen", "attempt": "1"}.items()
    kept = journalled(output, "loss")
    assert history(client, tracker.run_id, "loss") == [(step, value, time) for _, step, value, time in kept]
    assert [step for _, step, *_ in kept] == [5, 10]
    first = next(journal.read(output / "journal.jsonl"))
    assert run.info.start_time == first.body["began"] <= first.time <= kept[0][3] <= run.info.end_time

    artifacts = Path(run.info.artifact_uri)
    assert artifacts.is_relative_to(output / "artifacts")
    assert (artifacts / "config.yaml").read_text() == (output / "config.yaml").read_text()
    assert np.array_equal(pixels(output / "images/views/step_00000010.png"), picture)
    assert np.array_equal(pixels(next((artifacts / "images").glob("*.png"))), picture)


def pixels(path):
    from PIL import Image

    return np.asarray(Image.open(path))


def test_pictures_are_named_as_the_page_of_mlflow_expects(output, client):
    tracker = start(output)
    tracker.image(7, "a/b", np.zeros((40, 30), np.uint8))
    tracker.end("FINISHED")
    ours = sorted(a.path for a in client.list_artifacts(tracker.run_id, "images"))
    assert client.get_run(tracker.run_id).data.tags["mlflow.loggedImages"] == "True"

    other = client.create_run(client.get_run(tracker.run_id).info.experiment_id).info.run_id
    client.log_image(other, np.zeros((40, 30), np.uint8), key="a/b", step=7, timestamp=1796051427398)
    theirs = sorted(a.path for a in client.list_artifacts(other, "images"))
    shapes = [[re.sub(r"\d{13}", "TIME", re.sub(r"[0-9a-f-]{36}", "ID", p)) for p in paths] for paths in (ours, theirs)]
    assert (
        shapes[0]
        == shapes[1]
        == [
            "images/a~b+step+7+timestamp+TIME+ID+compressed.webp",
            "images/a~b+step+7+timestamp+TIME+ID.png",
        ]
    )


def test_after_a_rewind_a_step_is_not_sent_again_and_the_journal_keeps_both(output, client):
    tracker = start(output)
    for step in (5, 6, 7):
        tracker.log(step, {"loss": float(step)})
    tracker.image(6, "views", np.zeros((9, 9, 3), np.uint8))
    tracker.close()  # as a kill leaves it: no end
    run_id = tracker.run_id
    assert client.get_run(run_id).info.status == "RUNNING"

    tracker = start(output)
    assert tracker.attempt == 2
    for step in (6, 7, 8):
        tracker.log(step, {"loss": float(step) + 0.5, "knn": 1.0})
    tracker.image(6, "views", np.zeros((9, 9, 3), np.uint8))
    tracker.end("FINISHED")
    assert tracker.run_id == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [p[:2] for p in history(client, run_id, "loss")] == [(5, 5.0), (6, 6.0), (7, 7.0), (8, 8.5)]
    assert [p[0] for p in history(client, run_id, "knn")] == [6, 7, 8]  # a metric that was not sent before
    assert [p[:2] for p in journalled(output, "loss")] == [(1, 5), (1, 6), (1, 7), (2, 6), (2, 7), (2, 8)]
    assert len(client.list_artifacts(run_id, "images")) == 2


def test_what_a_crash_makes_the_sender_repeat_is_stored_once(output, client):
    tracker = start(output)
    tracker.close()
    before = (output / "tracking.json").read_text()
    tracker = start(output)
    for step in range(30):
        tracker.log(step, {"loss": float(step), "other": 2.0})
    tracker.image(3, "views", np.zeros((9, 9, 3), np.uint8))
    tracker.end("FINISHED")
    stored = history(client, tracker.run_id, "loss")
    assert len(stored) == 30

    (output / "tracking.json").write_text(before)  # killed between a request and the note of it
    assert sync(output)
    assert history(client, tracker.run_id, "loss") == stored
    assert len(client.list_artifacts(tracker.run_id, "images")) == 2

    (output / "tracking.json").write_text("{")  # lost altogether: the run is found by its job
    assert sync(output)
    assert history(client, tracker.run_id, "loss") == stored
    assert len(client.search_runs([client.get_run(tracker.run_id).info.experiment_id])) == 1


def test_values_that_are_not_numbers_are_counted_and_never_stored(output, client):
    tracker = start(output)
    tracker.log(1, {"loss": 1.0, "scale": 2.0})
    tracker.log(2, {"loss": float("inf"), "scale": float("nan"), "lr": 0.5})
    tracker.log(3, {"loss": 3.0})
    tracker.end("FINISHED")
    assert [p[:2] for p in history(client, tracker.run_id, "loss")] == [(1, 1.0), (3, 3.0)]
    assert [p[:2] for p in history(client, tracker.run_id, "non_finite")] == [(2, 2.0)]
    assert history(client, tracker.run_id, "lr")[0][:2] == (2, 0.5)
    assert client.get_run(tracker.run_id).data.tags["non_finite"] == "loss = inf at step 2"
    assert [p[2] for p in journalled(output, "loss")] == [1.0, "inf", 3.0]
    with sqlite3.connect(output / "mlflow.db") as database:
        assert database.execute("select count(*) from metrics where is_nan or abs(value) > 1e300").fetchone() == (0,)


def test_changed_parameters_become_tags(output, client):
    start(output).close()
    changed = Config(seed=7, optimizer={"name": "sgd"}, tracking={"system_metrics": False})
    tracker = start(output, changed)
    tracker.end("FINISHED")
    run = client.get_run(tracker.run_id)
    assert (run.data.params["seed"], run.data.params["optimizer.name"]) == ("0", "lars")
    assert {k: v for k, v in run.data.tags.items() if k.startswith("changed.")} == {
        "changed.seed": "0 -> 7",
        "changed.optimizer.name": "lars -> sgd",
    }
    assert Path(run.info.artifact_uri, "config.yaml").read_text() == (output / "config.yaml").read_text()


def test_failure_names_error_and_rank_until_a_later_attempt_succeeds(output, client):
    tracker = start(output)
    tracker.end("FAILED", "ValueError: " + "long " * 200, rank=1)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"].startswith("ValueError: long") and len(run.data.tags["error"]) == 500
    assert run.data.tags["error.rank"] == "1"
    tracker = start(output)
    tracker.end("FINISHED")
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and "error" not in run.data.tags


def test_deleted_run_is_replaced_by_one_with_the_whole_history(output, client):
    tracker = start(output)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    old = tracker.run_id
    client.delete_run(old)
    tracker = start(output, resume_run_id=old)
    tracker.log(2, {"loss": 2.0})
    tracker.end("FINISHED")
    assert tracker.run_id != old
    assert client.get_run(tracker.run_id).data.tags["continues"] == old
    assert [p[:2] for p in history(client, tracker.run_id, "loss")] == [(1, 1.0), (2, 2.0)]


def test_run_of_another_folder_is_continued_by_its_id(output, client, tmp_path):
    uri = f"sqlite:///{output}/mlflow.db"
    config = Config(tracking={"system_metrics": False, "uri": uri})
    tracker = start(output, config)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    other = tmp_path / "other"
    other.mkdir()
    continued = start(other, config, resume_run_id=tracker.run_id)
    for step in (2, 3, 4):
        continued.log(step, {"loss": -float(step)})
    continued.end("FINISHED")
    assert continued.run_id == tracker.run_id
    assert [p[:2] for p in history(client, tracker.run_id, "loss")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0)]


def test_starting_from_nothing_makes_a_new_run_and_closes_the_old(output, client):
    tracker = start(output)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    old = tracker.run_id
    tracker = start(output, new_run=True)
    tracker.log(1, {"loss": 5.0})
    tracker.end("FINISHED")
    assert tracker.run_id != old
    assert client.get_run(old).info.status == "KILLED"
    assert [p[:2] for p in history(client, tracker.run_id, "loss")] == [(1, 5.0)]


def test_unwritable_artifact_store_costs_no_metric_and_no_exit(output, client, caplog):
    (output / "artifacts").write_text("a file where the folder should be")
    tracker = start(output)
    tracker.image(1, "views", np.zeros((9, 9, 3), np.uint8))
    tracker.log(1, {"loss": 1.0})
    with caplog.at_level(logging.WARNING):
        tracker.end("FINISHED")
    assert f"./run.sh sync-tracking {output}" in caplog.text
    assert [p[:2] for p in history(client, tracker.run_id, "loss")] == [(1, 1.0)]
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    (output / "artifacts").unlink()
    assert sync(output)
    assert len(client.list_artifacts(tracker.run_id, "images")) == 2


def test_refused_record_is_named_and_the_others_arrive(output, client, caplog):
    tracker = start(output)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(step, {"good": 1.0} if step != 2 else {"bad;name": 1.0})
        tracker.end("FINISHED")
    assert [p[0] for p in history(client, tracker.run_id, "good")] == [0, 1, 3, 4]
    assert caplog.text.count("refuses") == 1 and "bad;name" in caplog.text


def test_host_metrics_have_the_names_that_mlflow_shows(output, client):
    tracker = start(output, Config(tracking={"system_metrics_seconds": 0.05}))
    time.sleep(0.5)
    tracker.end("FINISHED")
    latest = client.get_run(tracker.run_id).data.metrics
    assert 0 < latest["system/system_memory_usage_percentage"] < 100
    assert 0 <= latest["system/cpu_utilization_percentage"] <= 100
    assert set(host_metrics.HostMetrics(output).sample()) >= {
        f"system/{name}"
        for name in (
            "cpu_utilization_percentage",
            "system_memory_usage_megabytes",
            "disk_usage_percentage",
            "disk_available_megabytes",
            "network_receive_megabytes",
            "network_transmit_megabytes",
        )
    }


def test_store_is_chosen_by_config_then_environment_then_output(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(Config(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a:1")
    assert tracking_uri(Config(), tmp_path) == "http://a:1"
    assert tracking_uri(Config(tracking={"uri": "http://b:1"}), tmp_path) == "http://b:1"
    relative = tracking_uri(Config(tracking={"uri": "sqlite:///here.db"}), tmp_path)
    assert relative == f"sqlite:///{Path('here.db').absolute()}"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "/tmp/mlruns"])
def test_folder_as_store_is_refused_by_name(uri, tmp_path):
    with pytest.raises(InputError, match=r"^tracking\.uri: .*mlruns is a folder; .*sqlite:////"):
        start(tmp_path, Config(tracking={"uri": uri}))
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InputError, match="output: .*cannot be written"):
        start(tmp_path / "missing")


def test_sync_without_a_journal_is_refused(tmp_path):
    with pytest.raises(InputError, match="no run was recorded here"):
        sync(tmp_path)


def test_passwords_are_not_shown():
    assert sender.without_password("https://me:secret@host:1/x") == "https://host:1/x"
    assert sender.without_password("sqlite:////a/b.db") == "sqlite:////a/b.db"


def test_flatten_cuts_what_is_too_long():
    flat = flatten({"a": {"b": (1, 2), "c": None}, "long": "x" * 600})
    assert flat == {"a.b": "[1, 2]", "a.c": "None", "long": "x" * 499 + "…"}


def test_a_store_that_was_left_half_made_is_made_anew(tmp_path, monkeypatch):
    """By a process that was killed, or in this one by a full disk: MLflow then still has a connection to the half."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    def killed(store):
        raise SystemExit

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(SqlAlchemyStore, "_initialize_store_state", killed)  # it has its tables, and no experiment yet
        mlflow_store._connect(uri, tmp_path, "name")
    assert not (tmp_path / "mlflow.db").exists() and list(tmp_path.glob("*.new-*"))
    client, experiment = mlflow_store._connect(uri, tmp_path, "name")
    assert client.get_experiment(experiment).name == "name"
    assert not list(tmp_path.glob("*.new-*"))
