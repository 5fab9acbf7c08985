"""What the launcher makes of how a job ended: the code, and the last line."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import failures, launching

ROOT = Path(__file__).parents[2]
LOST = "print('Process 1 exit with status code 137.'); print('Process 0 exit with status code 1.')"


class HorovodInternalError(RuntimeError):
    """Of the name by which it is known."""


@pytest.fixture
def fails(tmp_path, monkeypatch):
    """Record a failure as the worker of that rank does."""
    monkeypatch.setattr(failures, "_output", tmp_path)
    monkeypatch.setattr(failures, "_step", 7)

    def fail(rank, error):
        with pytest.raises(type(error)), failures.recorded(lambda: rank):
            raise error

    return fail


def ended(program, output):
    return launching.run_filtered([sys.executable, "-c", f"{program}; raise SystemExit(1)"], {}, output)


def test_the_worker_that_was_killed_is_named_and_not_the_one_that_missed_it(tmp_path, fails, capfd):
    fails(0, HorovodInternalError("shut down"))
    assert ended(LOST, tmp_path) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank 1 was ended by SIGKILL (out of memory?)") and str(tmp_path / "errors") in last


def test_a_cause_goes_before_earlier_consequences(tmp_path, fails, capfd):
    fails(0, HorovodInternalError("shut down"))
    time.sleep(0.01)
    fails(2, ValueError("spoilt"))
    assert [failure.rank for failure in failures.found(tmp_path)] == [2, 0]
    assert ended(LOST, tmp_path) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank 2 on ") and "after step 7: ValueError: spoilt" in last


def test_one_that_ended_first_by_itself_is_not_said_to_be_killed(tmp_path, fails, capfd):
    """A worker that hangs is killed by horovodrun once another has ended."""
    fails(0, HorovodInternalError("stalled"))
    ended("; ".join(reversed(LOST.split("; "))), tmp_path)
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: rank 0 on ")


def test_workers_that_left_in_order_decide_the_code(tmp_path, fails):
    fails(0, HorovodInternalError("shut down"))
    failures.leave(tmp_path, 75)
    assert ended(LOST, tmp_path) == 75


@pytest.mark.parametrize(("code", "expected", "said"), [(-9, 137, "SIGKILL (out"), (-15, 143, "SIGTERM"), (75, 75, "")])
def test_the_end_of_a_job_of_one_worker_is_said(tmp_path, capfd, code, expected, said):
    assert launching._ended_alone(code, tmp_path) == expected
    assert said in capfd.readouterr().err


def test_an_error_of_one_worker_ends_with_its_rank_and_host(tmp_path, fails, capfd):
    fails(0, ValueError("spoilt"))
    assert launching._ended_alone(1, tmp_path) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank 0 on ") and "ValueError: spoilt" in last and "rank0.json" in last


def test_one_worker_has_so_long_to_end(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    with process.stdout, launching._signals_passed_to(process, kill_after=0.5) as seen:
        signal.raise_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGKILL and seen == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_before_a_worker_began_is_75(number, tmp_path):
    code = (
        "import sys, time; from pipeline import launching\n"
        "def slow(config): print(flush=True); time.sleep(60)\n"
        "launching.jobs.check_without_torch = slow\n"
        "launching.launch(['configs/quickstart.yaml', sys.argv[1], '-np', '2'])"
    )
    command = [sys.executable, "-c", code, f"output={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    process.stdout.readline()
    process.send_signal(number)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 75 and "before a worker began" in shown
