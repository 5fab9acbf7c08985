"""What our Horovod does that the released one does not, where no other test would meet it."""

import os
import re
import subprocess
import sys
from pathlib import Path


def run_two(program, **environment):
    """What two workers of a program beside this file print."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2", sys.executable, program],
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_collective_is_told_that_another_worker_left():
    """However late it comes: one that was prepared while the other left was lost, and its caller waited for ever."""
    assert "[0]<stdout>:always told" in run_two("leaves.py")


def test_a_collective_starts_when_it_is_asked_for():
    """Whoever comes last, and however rarely workers with nothing to do meet: here every 2 s."""
    shown = run_two("at_once.py", HOROVOD_CYCLE_TIME="2000")
    waits = [float(seconds) for seconds in re.findall(r"late \w+: ([0-9.]+) s at most", shown)]
    assert len(waits) == 6 and max(waits) < 1, shown
