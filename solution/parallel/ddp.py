"""Data parallelism, each gradient by itself: one asynchronous all-reduce per parameter.

Problem. Every rank computes gradients from its own data; all ranks must step with their mean, and
the network should work while the backward still computes.

The algorithm (the order of things, and what happens to absent gradients, is in `reducer.py`):
1. At construction every rank takes the first rank's parameters and buffers.
2. When a gradient is complete, it is multiplied by 1/W where it lies and its all-reduce is
   launched, in reverse order of registration: last layers are ready first.
3. `finish_gradient_synchronization` waits for all of them.

Invariants. `.grad` is the very memory that is reduced: no copies, no further memory.

Cost. With n bytes of gradients 2n(W-1)/W bytes per step and rank, in as many messages as there are
parameters. Each has its latency (about a millisecond on gloo), which for small parameters is more
than its transfer; this is what `ddp_bucketed.py` removes.

Paper: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
section 3.2.1 (the naive solution, here already overlapped). PyTorch has no counterpart;
`DistributedDataParallel(bucket_cap_mb=0)` comes near.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from solution import comm, flat
from solution.parallel.reducer import Reducer
from solution.parallel.replica import Replica


def ddp(module: nn.Module, *, process_group: comm.Group = None) -> DDPIndividualParameters:
    """Wraps `module` so that each gradient is averaged over `process_group` by itself."""
    return DDPIndividualParameters(module, process_group=process_group)


class DDPIndividualParameters(Replica):
    """A replica that sends each gradient as soon as it and those before it are complete."""

    def __init__(self, module: nn.Module, *, process_group: comm.Group = None) -> None:
        super().__init__(module, options=(), process_group=process_group)
        self._reducer = _InPlace(self._trainable, process_group)


class _InPlace(Reducer):
    """A gradient is sent from where it lies."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: comm.Group) -> None:
        # A cap that every parameter reaches: each is a bucket of its own.
        super().__init__(named, cap_bytes=0, group=group)
        self.strides = [flat.strides_for(parameter) for parameter in self.parameters]

    def place(self, index: int) -> torch.Tensor:
        parameter, strides = self.parameters[index], self.strides[index]
        gradient = parameter.grad
        if gradient is not None and gradient.stride() == strides:
            # create_graph=True gives gradients a history, which nothing may be written into.
            return gradient.detach() if gradient.requires_grad else gradient
        # Absent here, or laid out in a way that a peer's need not be (expanded, transposed).
        return torch.empty_strided(
            parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
        )

    def buffer(self, bucket: int) -> torch.Tensor:
        [index] = self.buckets[bucket]
        gradient = self.staged[index]
        return gradient.as_strided((gradient.numel(),), (1,))
