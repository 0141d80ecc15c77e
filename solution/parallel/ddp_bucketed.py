"""Data parallelism in buckets: one asynchronous all-reduce for many gradients.

Problem. A collective costs about a millisecond before it moves a byte, so a message per parameter
wastes most of its time on small ones; one message for all gradients could only start when backward
is over. Buckets are a compromise: few messages, and the first leaves early.

The one idea added to `ddp.py`: gradients are kept in flat buffers.
1. Parameters are assigned to buckets in reverse order of registration, so that a bucket fills with
   gradients that are complete at about the same time (`flat.plan_buckets`).
2. When a gradient is complete it is written, times 1/W, to its slot, a view of the bucket's buffer,
   and the slot becomes `.grad`. This one pass is all the copying there is: nothing is unpacked.
3. A full bucket is launched, in order (`reducer.py`).

Invariants. After `finish_gradient_synchronization` every `.grad` is a view of its bucket, with the
strides of its parameter. The next round writes to the same memory: clone a gradient to keep it.

Cost. 2n(W-1)/W bytes per step and rank for n bytes of gradients, in one message per bucket.
Gradient memory is n, plus the one gradient that backward has just produced; inside a `no_sync`
window the local sums are n more, as long as they have not been staged.

Paper: Li et al. 2020 (see `replica.py`), sections 3.2.2 and 3.2.3. PyTorch counterpart:
`DistributedDataParallel(gradient_as_bucket_view=True)`; the rule that closes a bucket is the same,
the order is not rebuilt after the first step.
"""

from collections.abc import Sequence

import torch
from torch import nn

from solution import comm, flat
from solution.parallel.reducer import Reducer
from solution.parallel.replica import Replica


class DDPBucketed(Replica):
    """A replica whose gradients live in buckets and are sent a bucket at a time.

    Args:
        module: the model; its Parameter objects are kept.
        bucket_size_mb: a bucket is closed once it holds this many MiB; 0 means a bucket per
            parameter.
        process_group: over which gradients are averaged; None is the default group.

    Raises:
        ValueError: a negative bucket size, or a group that this rank does not belong to.
    """

    def __init__(
        self, module: nn.Module, *, bucket_size_mb: float, process_group: comm.Group = None
    ) -> None:
        if not bucket_size_mb >= 0:  # also refuses NaN
            raise ValueError(f"expected bucket_size_mb of at least 0, got {bucket_size_mb}")
        super().__init__(module, options=(bucket_size_mb,), process_group=process_group)
        cap_bytes = bucket_size_mb * flat.MIB
        self._reducer = _Slots(self._trainable, process_group, cap_bytes=cap_bytes)


ddp_bucketed = DDPBucketed  # the contract's name


class _Slots(Reducer):
    """A reducer that sends each gradient from its slot, a view of its bucket's buffer."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group: comm.Group, *, cap_bytes: float
    ) -> None:
        super().__init__(named, group, cap_bytes=cap_bytes)
        self.buffers: list[torch.Tensor] = []
        self.slots: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            members = [self.parameters[index] for index in bucket]
            numel = sum(parameter.numel() for parameter in members)
            buffer = torch.zeros(numel, dtype=members[0].dtype, device=members[0].device)
            self.buffers.append(buffer)
            self.slots.update(zip(bucket, flat.cut(buffer, members), strict=True))

    def place(self, index: int) -> torch.Tensor:
        return self.slots[index]

    def buffer(self, bucket: int) -> torch.Tensor:
        return self.buffers[bucket]
