"""Who owns an output folder: live and dead processes, of this machine and of others."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dali.errors import InputError
from pipeline import file_systems, lease, tracking
from pipeline.lease import FILE, Lease, Owner, refuse_if_owned

HOLD = """if True:
    import sys, time
    from pathlib import Path
    from pipeline.lease import Lease
    Lease.take(Path(sys.argv[1]), sys.argv[2])
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that owns the folder for the job `first`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path, "first"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.8)


def elsewhere(folder, age=0.0):
    """The lease of a process on another machine, `age` seconds after its last heartbeat."""
    path = folder / FILE
    path.write_text(json.dumps(Owner("first", "node7", os.getpid(), 1, "another boot")._asdict()))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_second_job_is_told_who_owns_the_folder(tmp_path, other):
    """Case 49: by the worker and by the launcher; the folder stays the first job's."""
    named = rf"output: {tmp_path} is in use by process {other.pid} on .* \(job first\), last heartbeat \d+ s ago"
    with pytest.raises(InputError, match=named):
        Lease.take(tmp_path, "second")
    with pytest.raises(InputError, match=named):
        refuse_if_owned(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["job"] == "first"


def test_a_dead_owner_s_folder_is_taken_at_once(tmp_path, other, capfd):
    """kill -9 leaves the lease; its process is looked up. Even a new process with its number is not it."""
    other.kill()
    other.wait()
    start = time.monotonic()
    held = Lease.take(tmp_path, "second")
    assert time.monotonic() - start < 5 and held.is_new
    assert f"taken over from process {other.pid} on" in capfd.readouterr().out
    held.release()
    assert not (tmp_path / FILE).exists()
    ours = Owner("first", "here", os.getpid(), 1, lease._place())  # our number, but another start
    (tmp_path / FILE).write_text(json.dumps(ours._asdict()))
    Lease.take(tmp_path, "third").release()


def test_a_later_process_of_the_same_job_takes_it(tmp_path, other):
    """Elastic workers: rank 0 is another process after a host is lost."""
    held = Lease.take(tmp_path, "first")
    assert not held.is_new and json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    held.release()


def test_another_machine_s_owner_is_given_time_for_a_heartbeat(tmp_path, quick, capfd, monkeypatch):
    """Silent: dead. One heartbeat: alive."""
    path = elsewhere(tmp_path)
    held = Lease.take(tmp_path, "second")
    assert "waiting up to" in capfd.readouterr().out
    held.release()
    elsewhere(tmp_path)
    monkeypatch.setattr(lease, "STALE_SECONDS", 30)
    beats = "import os, sys, time\nfor _ in range(40): os.utime(sys.argv[1]); time.sleep(0.2)"
    beating = subprocess.Popen([sys.executable, "-c", beats, path])
    try:
        with pytest.raises(InputError, match=r"in use by process \d+ on node7"):
            Lease.take(tmp_path, "second")
    finally:
        beating.kill()
        beating.wait()


def test_long_silence_needs_no_waiting(tmp_path):
    elsewhere(tmp_path, age=lease.STALE_SECONDS + 10)
    start = time.monotonic()
    Lease.take(tmp_path, "second").release()
    assert time.monotonic() - start < 5


def test_the_heartbeat_moves_and_stops_with_the_lease(tmp_path, quick):
    held = Lease.take(tmp_path, "first")
    path = tmp_path / FILE
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 10
    while path.stat().st_mtime == 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    held.release()
    assert not list(tmp_path.glob(f"{FILE}*.tmp"))


def test_an_owner_that_was_taken_for_dead_ends_itself(tmp_path):
    """A machine that was suspended wakes up, and another job has the folder."""
    code = HOLD.replace("Lease.take", "import pipeline.lease; pipeline.lease.BEAT_SECONDS = 0.1\n    Lease.take")
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path, "first"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / FILE).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    elsewhere(tmp_path).write_text(json.dumps(Owner("second", "node7", 1, 1, "another boot")._asdict()))
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 1 and "now belongs to process 1 on node7 (job second)" in shown


def test_two_that_start_together_do_not_both_get_it(tmp_path):
    command = [sys.executable, "-c", HOLD.replace("sleep(60)", "sleep(2)"), str(tmp_path)]
    both = [
        subprocess.Popen([*command, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for job in "ab"
    ]
    shown = [process.communicate(timeout=60) for process in both]
    assert sorted(out for out, _ in shown) == ["", "held\n"], shown
    assert any("is in use by" in errors for _, errors in shown)


def test_who_is_quicker_between_a_look_and_the_taking_has_it(tmp_path, monkeypatch):
    free = lease._free

    def look(output, job):
        seen = free(output, job)
        if not (output / FILE).exists():
            quicker = Owner("first", "here", os.getppid(), lease._began(os.getppid()), lease._place())
            (output / FILE).write_text(json.dumps(quicker._asdict()))
        return seen

    monkeypatch.setattr(lease, "_free", look)
    with pytest.raises(InputError, match="in use by"):
        Lease.take(tmp_path, "second")


def test_a_run_that_died_is_marked_once(tmp_path):
    journal = tracking.Journal(tmp_path / "journal.jsonl")
    journal.append("start", job="x")
    journal.append("metrics", step=1, metrics={})
    assert tracking.mark_killed(tmp_path, "killed") and not tracking.mark_killed(tmp_path, "killed")
    *_, last = tracking.read(tmp_path / "journal.jsonl")
    assert (last.kind, last.attempt, last.body["status"]) == ("end", 1, "KILLED")
    assert not tracking.mark_killed(tmp_path / "nowhere", "killed")


MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:25 / /home rw shared:9 - nfs4 server:/home rw,vers=4.2
31 30 0:26 / /home/scratch\040a rw - xfs /dev/sdb rw
32 22 0:27 / /lab rw - fuse.sshfs me@there:/lab rw
""".strip()


def test_network_file_systems_are_recognised():
    kinds = {p: file_systems.network_file_system(Path(p), MOUNTS) for p in ("/x", "/home/a", "/lab", "/homes/a")}
    assert kinds == {"/x": None, "/home/a": "nfs4", "/lab": "fuse.sshfs", "/homes/a": None}
    assert file_systems.network_file_system(Path("/home/scratch a/out"), MOUNTS) is None


def test_sqlite_on_a_network_file_system_is_warned_about(tmp_path, monkeypatch, capfd):
    tracking._warn_of_network(f"sqlite:///{tmp_path}/mlflow.db")
    assert capfd.readouterr().out == ""
    kinds = re.findall(r" - (\S+) ", Path("/proc/self/mountinfo").read_text())
    monkeypatch.setattr(file_systems, "NETWORK", frozenset(kinds))  # every kind that this machine has
    tracking._warn_of_network(f"sqlite:///{tmp_path}/mlflow.db")
    assert "SQLite's locks do not hold" in capfd.readouterr().out
    tracking._warn_of_network("http://tracking:5000")
    assert capfd.readouterr().out == ""
