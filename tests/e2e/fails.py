"""Worker of test_stopping.py: rank 1 fails in its fourth step."""

import sys

from pipeline import stopping

stopping.hear()
stopping.block()

from pipeline import training  # noqa: E402
from pipeline.__main__ import main  # noqa: E402

train_step = training.train_step


def failing_step(run, y1, y2):
    if run.step == 3 and run.world.rank == 1:
        raise ValueError("spoilt")
    return train_step(run, y1, y2)


training.train_step = failing_step
sys.exit(main(sys.argv[1:]))
