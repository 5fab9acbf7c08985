"""Workers of test_horovod.py: rank 1 leaves while rank 0 hands in a group of collectives; rank 0 must be told."""

import sys
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

TRIES = 20
TENSORS = [torch.ones(1)] * 20_000  # handing them in takes as long as a step's take in thousands of steps
PATIENCE = 5.0

took = 0.0
for number in range(TRIES):
    hvd.init()
    took = float(hvd.allreduce(torch.tensor(took), op=hvd.Sum, name=f"took.{number}"))
    if hvd.rank() == 1:
        # from half of the time that rank 0 needs to a little more: the queue is reached at its end
        time.sleep(took * (0.5 + 0.7 * number / TRIES))
        took = 0.0
        hvd.shutdown()
        continue
    start = time.monotonic()
    try:
        handle = hvd.grouped_allreduce_async(TENSORS, op=hvd.Sum, name=f"group.{number}")
        took = time.monotonic() - start
        while not hvd.poll(handle):
            if time.monotonic() - start > took + PATIENCE:
                sys.exit(f"try {number}: waits for ever")
            time.sleep(0.01)
        hvd.synchronize(handle)
        sys.exit(f"try {number}: reduced by one worker alone")
    except HorovodInternalError:
        took = took or time.monotonic() - start
    hvd.shutdown()
print("always told", flush=True)
