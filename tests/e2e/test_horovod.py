"""What our Horovod does that the released one does not, where no other test would meet it."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_collective_is_told_that_another_worker_left():
    """However late it comes: one that was prepared while the other left was lost, and its caller waited for ever."""
    program = [sys.executable, str(Path(__file__).with_name("leaves.py"))]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0 and "[0]<stdout>:always told" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
