"""Checkpoints on disks that misbehave; in a thread beside training."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from dali.errors import InputError
from pipeline import checkpoint


def state(step, value=0.0, size=30_000):
    tensors = {"a": torch.full((size,), float(value)), "b": torch.arange(6.0).view(1, 2, 1, 3).contiguous()}
    rest = {"scaler": {}, "config": {"x": [1, "y"]}, "run_id": None, "facts": {}}
    return {"step": step, "model": tensors, "optimizer": {"state": {0: {"mu": torch.ones(3)}}}, **rest}


def files(output):
    return sorted(file.name for file in (output / checkpoint.FOLDER).iterdir())


@contextmanager
def full_disk(output):
    """Room for a part of a checkpoint: a small tmpfs where we may mount one, else a limit on the size of a file."""
    folder = output / checkpoint.FOLDER
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        yield mounted
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if mounted:
            subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(tmp_path, capfd):
    """Case 12: the one before stays usable, nothing half is left, and once there is room the next one is written."""
    writer = checkpoint.Writer(tmp_path, keep=3)
    (tmp_path / checkpoint.FOLDER).mkdir()
    with full_disk(tmp_path) as small_disk:
        steps = (1, 2, 3) if small_disk else (1,)
        for step in steps:
            writer.save(state(step, step, size=300_000), milestone=False)
        writer.wait()
        assert list(writer.failed) == [steps[-1]]
        shown = capfd.readouterr().out
        assert f"warning: the checkpoint of step {steps[-1]} could not be written" in shown and str(tmp_path) in shown
        assert ("No space left on device" if small_disk else "File too large") in shown
        assert not any(name.startswith(f"step_{steps[-1]:08d}") or name.startswith(".") for name in files(tmp_path))
        if small_disk:
            found = checkpoint.find(tmp_path, "auto")
            assert found is not None and found.name == "step_00000002.pt"
            checkpoint.path_of(tmp_path, 1).unlink()
            writer.save(state(3, 3), milestone=False)
            writer.wait()
            assert not writer.failed and checkpoint.find(tmp_path, "auto").name == "step_00000003.pt"


def test_a_file_that_may_not_grow_leaves_the_one_before(tmp_path):
    writer = checkpoint.Writer(tmp_path, keep=3)
    writer.save(state(1), milestone=False)
    writer.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        writer.save(state(2), milestone=False)
        writer.wait()
        with pytest.raises(OSError):
            checkpoint.save_file(tmp_path / "backbone.pth", state(2)["model"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(writer.failed) == [2] and not list(tmp_path.glob(".*"))
    assert files(tmp_path) == ["latest", "step_00000001.pt", "step_00000001.sha256"]
    assert checkpoint.defect(checkpoint.path_of(tmp_path, 1)) is None


def test_what_is_saved_is_the_state_of_that_step(tmp_path, monkeypatch):
    """Training changes the tensors while the thread is still waiting for its disk; the next save waits for this one."""
    may_write, syncing = threading.Event(), os.fsync

    def slow(descriptor):
        assert may_write.wait(30)
        syncing(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    writer = checkpoint.Writer(tmp_path, keep=3)
    live = state(1, 1.0)
    writer.save(live, milestone=False)
    live["model"]["a"].fill_(2.0)
    live["optimizer"]["state"][0]["mu"].fill_(2.0)
    assert not checkpoint.path_of(tmp_path, 1).exists()
    threading.Timer(0.3, may_write.set).start()
    writer.save(live | {"step": 2}, milestone=True)
    assert checkpoint.path_of(tmp_path, 1).exists()
    writer.wait()
    first, second = (checkpoint.load(checkpoint.path_of(tmp_path, step)) for step in (1, 2))
    assert first["model"]["a"].unique() == 1 and first["optimizer"]["state"][0]["mu"].unique() == 1
    assert second["model"]["a"].unique() == 2
    assert (tmp_path / "checkpoints/milestones/step_00000002.pt").samefile(checkpoint.path_of(tmp_path, 2))


def test_an_error_that_is_not_the_disk_s_surfaces(tmp_path):
    writer = checkpoint.Writer(tmp_path, keep=3)
    writer.save(state(1) | {"facts": {"no": lambda: None}}, milestone=False)
    with pytest.raises(Exception, match="pickle"):
        writer.save(state(2), milestone=False)
    writer.save(state(3), milestone=False)
    writer.wait()
    assert files(tmp_path) == ["latest", "step_00000003.pt", "step_00000003.sha256"]


def test_a_killed_writer_s_leftovers_go_and_old_ones_are_dropped(tmp_path):
    code = """if True:
        import os, sys
        from pathlib import Path
        from pipeline import checkpoint
        from tests.unit.test_checkpoint import state
        os.fsync = lambda descriptor: os._exit(9)
        checkpoint.save(Path(sys.argv[1]), state(1), 2, False)
    """
    assert subprocess.run([sys.executable, "-c", code, tmp_path], cwd=os.getcwd()).returncode == 9
    assert files(tmp_path) == [".step_00000001.pt.tmp"]
    (tmp_path / checkpoint.FOLDER / "step_00000001.sha256").write_text("killed before the rename\n")
    for step in (2, 3, 4):
        checkpoint.save(tmp_path, state(step), keep=2, milestone=False)
    pairs = [f"step_0000000{step}.{kind}" for step in (3, 4) for kind in ("pt", "sha256")]
    assert files(tmp_path) == ["latest", *pairs]


@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped"])
def test_a_damaged_newest_is_passed_over(tmp_path, damage, capfd):
    for step in (1, 2):
        checkpoint.save(tmp_path, state(step), keep=3, milestone=False)
    newest = checkpoint.path_of(tmp_path, 2)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"cut": content[: len(content) * 6 // 10], "emptied": b"", "flipped": content}[damage])
    found = checkpoint.find(tmp_path, "auto")
    assert found is not None and found.name == "step_00000001.pt"
    assert f"warning: {newest}: its checksum is not the one" in capfd.readouterr().out
    shutil.copyfile(newest, checkpoint.path_of(tmp_path, 1))
    with pytest.raises(InputError, match="all 2 checkpoints are damaged"):
        checkpoint.find(tmp_path, "auto")


def test_after_a_rewind_the_new_branch_is_the_one_that_goes_on(tmp_path):
    """What is given up is set aside, each time in a folder of its own; the newest of the new branch are kept."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step, step), keep=3, milestone=step == 10)
    checkpoint.path_of(tmp_path, 10).unlink()  # only the milestone is left of it
    chosen = tmp_path / checkpoint.FOLDER / "milestones" / "step_00000010.pt"
    checkpoint.rewind(tmp_path, chosen, checkpoint.load(chosen))
    assert checkpoint.find(tmp_path, "auto") == checkpoint.path_of(tmp_path, 10)
    for step in (11, 12):
        checkpoint.save(tmp_path, state(step, -step), keep=3, milestone=False)
    newest = checkpoint.find(tmp_path, "auto")
    assert newest is not None and checkpoint.load(newest)["model"]["a"][0] == -12
    assert [name for name in files(tmp_path) if name.endswith(".pt")] == [f"step_000000{n}.pt" for n in (10, 11, 12)]
    eleven = checkpoint.path_of(tmp_path, 11)
    checkpoint.rewind(tmp_path, eleven, checkpoint.load(eleven))
    for number, steps in ((1, (20, 30)), (2, (12,))):
        aside = tmp_path / checkpoint.FOLDER / f"aside-{number}"
        kept = [aside / f"step_000000{step}.pt" for step in steps]
        assert sorted(aside.glob("*.pt")) == kept and all(checkpoint.defect(file) is None for file in kept)


def test_a_bare_interpreter_reads_it(tmp_path):
    """Case 30: no code of ours, nothing but tensors and plain values."""
    path = checkpoint.save(tmp_path, state(5, 3.0), keep=1, milestone=False)
    code = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); print(s['step'], s['model']['a'].max())"
    done = subprocess.run([sys.executable, "-c", code, path], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "tensor(3.)"]


def test_tensors_that_are_not_finite_are_named():
    values = state(1, 1e30)  # its norm overflows; it is finite
    assert checkpoint.not_finite(values) == []
    values["model"]["b"][0, 1, 0, 2] = float("nan")
    values["optimizer"]["state"][0]["mu"][1] = float("inf")
    assert checkpoint.not_finite(values) == ["model.b", "optimizer.state.0.mu"]
