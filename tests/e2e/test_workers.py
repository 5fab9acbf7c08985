"""tests/workers under horovodrun: every rank runs the same tests in the same order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launching import KEEP_MEMORY, starter

ROOT = Path(__file__).parents[2]


# Of three workers: what is computed, where a third share is uneven; two are enough to see what is said to whom
EXACT = [f"tests/workers/test_{name}.py" for name in ("sync_bn", "loss", "training", "knn", "evaluation")]
TOLD = "mixed_precision refused frozen time_that_is_up judgement hosts command online bad_images bad_one not_finite"
OF_THREE = " and ".join(f"not {word}" for word in TOLD.split())


@pytest.mark.parametrize(("count", "files", "chosen"), [(2, ["tests/workers"], ""), (3, EXACT, OF_THREE)])
def test_worker_tests_pass_on_every_rank(count, files, chosen):
    """A rank that fails alone leaves the others waiting: the stall check ends them."""
    words = ["-m", "pytest", "-q", "-x", *files, "--durations=8", "-k", chosen]
    command = [*starter(count), sys.executable, *words]
    environment = (
        KEEP_MEMORY
        | os.environ
        | {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
        }
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    passed = [line for line in done.stdout.splitlines() if " passed" in line]
    assert done.returncode == 0 and len(passed) == count, done.stdout[-6000:] + done.stderr[-3000:]
    print(*passed, sep="\n")
