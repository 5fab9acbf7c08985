"""Worker of test_two_hosts.py: on SIGTERM all ranks agree to stop, take more than Horovod's 5 s for it, and exit 75."""

import os
import signal
import time

import horovod.torch as hvd
import torch

signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
hvd.init()
print(f"rank {hvd.rank()} up", flush=True)
while not hvd.allreduce(torch.tensor(len(signals)), op=hvd.Sum, name="stop"):
    time.sleep(0.05)
time.sleep(7)
print(f"rank {hvd.rank()} saved, got SIGTERM: {len(signals)}", flush=True)
os._exit(75)
