"""What a worker of an elastic job does when it is told to go, or when another is lost before all have a state."""

import time
from types import SimpleNamespace

import pytest

from pipeline import checkpoint, elastic, failures, pretraining, stopping, workers
from pipeline.config import Config


@pytest.fixture
def job(world, tmp_path, monkeypatch):
    """A job with a state of step 3, whose process does not end when it goes."""
    made = elastic._Job(Config(output=str(tmp_path)), SimpleNamespace(wish=stopping.PREEMPTED))
    gone = []
    monkeypatch.setattr(made, "_go", lambda: gone.append(True))
    monkeypatch.setattr(made, "save", lambda: None)
    monkeypatch.setattr(made, "check_host_updates", lambda: None)
    monkeypatch.setattr(made, "config", made.config.model_copy(update={"output": str(tmp_path)}))
    made.gone = gone
    return made


def test_only_who_wants_alone_to_stop_goes_alone(world, job):
    """A signal that came to all during a long evaluation is for the vote, however long ago it came."""
    step = SimpleNamespace(step=10)
    job._told_at = time.monotonic() - 60
    job.after_step(step)
    assert not job.gone
    assert job._vote.cast(stopping.PREEMPTED) == stopping.GO_ON
    job.after_step(step)
    assert not job.gone
    outcome = job._vote.cast(stopping.PREEMPTED)
    assert outcome == stopping.PREEMPTED and job._vote.refused_at is None  # all wanted it
    job._vote.close()


def test_who_is_refused_goes_after_a_commit(world, job):
    if world.size == 1:
        pytest.skip("alone, nobody refuses")
    step, mine = SimpleNamespace(step=10), stopping.PREEMPTED if world.rank == 0 else stopping.GO_ON
    job._told_at = time.monotonic() - 60 if world.rank == 0 else None
    for _ in range(2):
        assert job._vote.cast(mine) == stopping.GO_ON
    job.after_step(step)
    assert bool(job.gone) == (world.rank == 0)
    job._vote.close()


def test_a_worker_lost_before_all_have_a_state_means_to_begin_again(world, job, monkeypatch):
    """Horovod then calls restore and reset, here while the run is half built."""
    job.run = SimpleNamespace(step=0)
    job.restore()
    assert job.run is None
    job.reset()
    prepared = []
    monkeypatch.setattr(pretraining, "prepare", lambda config, world: prepared.append(True) or SimpleNamespace(step=0))
    if world.rank == world.size - 1 and world.size > 1:
        job._kept = {"step": 3}  # this one had come further; rank 0 had not
    job.sync()
    assert prepared and job.run is not None


def test_between_groups_of_workers_the_last_commit_is_saved(world, job, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "last_rank", lambda: 0)
    job._save_what_is_kept()  # before a state is there: nothing to save, but the code is told
    assert failures.exit_code(tmp_path) == 75 and checkpoint.find(tmp_path, "auto") is None
    ended = []
    tracker = SimpleNamespace(run_id="r", end=lambda *words, **more: ended.append(words[0]))
    job.duties = pretraining.Duties(tracker, None, 0, {}, checkpoint.Writer(tmp_path, 3))
    job.run = SimpleNamespace(config=job.config, source=SimpleNamespace(digest="d", __len__=lambda self: 5))
    monkeypatch.setattr(pretraining, "file_content", lambda run, kept, run_id: content(kept, run_id))
    job._kept = {"step": 3, "model": {}, "optimizer": {}, "scaler": {}, "bad_files": {}}
    job._save_what_is_kept()
    found = checkpoint.find(tmp_path, "auto")
    assert found is not None and checkpoint.load(found)["step"] == 3 and ended == ["KILLED"]


def content(kept, run_id):
    return {**kept, "config": {}, "run_id": run_id, "facts": {}}
