"""Worker of test_two_hosts.py: ranks 0 and 1 on one host, 2 on the other; sums over all and over two process sets."""

import socket

import horovod.torch as hvd
import torch

ACROSS = hvd.ProcessSet([0, 2])
ALONE = hvd.ProcessSet([1])

hvd.init(process_sets=[ACROSS, ALONE])
mine = ALONE if hvd.rank() == 1 else ACROSS
part = torch.full((3,), 2.0 ** hvd.rank())  # powers of two: a sum tells whose parts are in it
everyone = hvd.allreduce(part, op=hvd.Sum, name="everyone")
some = hvd.allreduce(part, op=hvd.Sum, name="some", process_set=mine)
print(f"rank {hvd.rank()} on {socket.gethostname()}: all {everyone[0]:.0f}, set {some[0]:.0f}", flush=True)
hvd.shutdown()
