"""Data parallelism, each gradient by itself: one asynchronous all-reduce per parameter.

Problem. Every rank computes gradients from its own data; all ranks must step with their mean, and
the network should work while the backward still computes.

When a gradient is complete, it is multiplied by 1/W where it lies, without a copy, and its
all-reduce is launched, in reverse order of registration: last layers are ready first (`reducer.py`
describes the order of messages, and absent gradients). `finish_gradient_synchronization` waits.

Cost. With n bytes of gradients 2n(W-1)/W bytes per step and rank, in as many messages as there are
parameters. Each has its latency (about a millisecond on gloo), which for small parameters is more
than its transfer; this is what `ddp_bucketed.py` removes.

Paper: Li et al. 2020 (see `replica.py`), section 3.2.1: the naive solution, here already
overlapped. PyTorch has no counterpart; `DistributedDataParallel(bucket_cap_mb=0)` comes near.
"""

from torch import nn

from solution import comm
from solution.parallel.reducer import Reducer
from solution.parallel.replica import Replica


class DDPIndividualParameters(Replica):
    """A replica that sends each gradient as soon as it and those before it are complete."""

    def __init__(self, module: nn.Module, *, process_group: comm.Group = None) -> None:
        super().__init__(module, options=(), process_group=process_group)
        self._reducer = Reducer(self._trainable, process_group)


ddp = DDPIndividualParameters  # the contract's name
