"""Workers of test_horovod.py: small collectives, one after the other and with either worker late."""

import time

import horovod.torch as hvd
import torch

ROUNDS, LATE = 8, 0.05

hvd.init()
hvd.allreduce(torch.zeros(1), name="first")
for late in (None, 0, 1):
    took = []
    for number in range(ROUNDS):
        if hvd.rank() == late:
            time.sleep(LATE)
        start = time.monotonic()
        handles = [hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name=f"{late}.{number}.{i}") for i in range(3)]
        handles.append(hvd.allgather_async(torch.ones(1 + hvd.rank(), 2), name=f"{late}.{number}.rows"))
        for handle in handles:
            hvd.synchronize(handle)
        took.append(time.monotonic() - start)
    print(f"late {late}: {max(took):.4f} s at most", flush=True)
hvd.shutdown()
