"""Worker of test_resilience.py: rank 0 takes longer over a save than the watchdog's limit, which is in order; later the
last rank sleeps in a step, which is not.
"""

import sys
import time

from pipeline import stopping

stopping.hear()
stopping.block()

from pipeline import checkpoint, training  # noqa: E402
from pipeline.__main__ import main  # noqa: E402

train_step, save = training.train_step, checkpoint.Writer.save


def sleepy_step(run, y1, y2):
    if run.step == 3 and run.world.rank == run.world.size - 1:
        time.sleep(600)
    return train_step(run, y1, y2)


def slow_save(self, state, *args, **more):
    time.sleep(11)
    print(f"saved slowly at step {state['step']}", flush=True)
    save(self, state, *args, **more)


training.train_step, checkpoint.Writer.save = sleepy_step, slow_save
sys.exit(main(sys.argv[1:]))
