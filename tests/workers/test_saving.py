"""Checkpoints that cannot be written, and folders that belong to somebody else, seen by all workers."""

import json
import os
import sqlite3
import threading

import pytest

from dali.errors import InputError
from pipeline import checkpoint, lease, pretraining, workers
from tests.workers.test_training import digits, settings  # noqa: F401


def test_a_disk_that_takes_no_checkpoint_ends_the_run_only_at_its_end(
    world, settings, monkeypatch, capfd  # noqa: F811
):  # fmt: skip
    """Training goes on to the last step; then all workers say that the last checkpoint is missing."""
    made = settings("checkpoint.every_steps=1", "model.projector=[8]", "tracking.uri=null")
    folder = made.output_path / checkpoint.FOLDER
    log = pretraining._log

    def break_the_folder(run, values, tracker):
        if run.step == 3 and world.rank == 0:
            for thread in [thread for thread in threading.enumerate() if thread.name == "checkpoint"]:
                thread.join()  # step 2's
            folder.rename(folder.with_name("away"))
            folder.write_text("in the way")
        log(run, values, tracker)

    monkeypatch.setattr(pretraining, "_log", break_the_folder)
    with pytest.raises(RuntimeError, match=r"the last checkpoint, of step 6, could not be written \(.+\); make room"):
        pretraining.pretrain(made, world)
    workers.barrier("all have raised")
    if world.rank:
        return
    shown = capfd.readouterr().out
    assert "step 6/6" in shown and "training goes on" in shown
    assert "warning: these checkpoints could not be written, by step: 3 (" in shown
    folder.unlink()
    folder.with_name("away").rename(folder)
    found = checkpoint.find(made.output_path, "auto")
    assert found is not None and found.name == "step_00000002.pt"
    with sqlite3.connect(made.output_path / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FAILED",)]
        tags = dict(database.execute("select key, value from tags"))
        stalls = database.execute("select count(*) from metrics where key = 'checkpoint_stall_seconds'").fetchone()
    assert tags["checkpoints_failed"].startswith("3 (") and stalls == (6,)


def test_all_workers_hear_that_the_folder_is_taken(world, settings, tmp_path):  # noqa: F811
    output = settings().output_path
    with workers.together():
        if world.rank == 0:
            output.mkdir(parents=True)
            parent = lease.Owner("another", "here", os.getppid(), lease._began(os.getppid()), lease._place())
            (output / lease.FILE).write_text(json.dumps(parent._asdict()))
    with pytest.raises(InputError, match=r"in use by process \d+ on here \(job another\)"):
        with pretraining.owned(output, world):
            raise AssertionError("entered")
    workers.barrier("refused")
    if world.rank == 0:
        (output / lease.FILE).unlink()
    with pretraining.owned(output, world):
        assert (output / lease.FILE).exists()
        workers.barrier("seen")
    assert world.rank or not (output / lease.FILE).exists()
