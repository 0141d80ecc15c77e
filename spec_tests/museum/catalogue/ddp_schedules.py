"""Near-misses that only another order of events, thread, dtype or rank can show.

On one quiet machine operations complete in the order of their launch and long before anyone looks,
so those of schedules give right gradients there, again and again.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.plain.ddp import PlainDdp


@near_miss(
    "ddp.waits-for-last-only",
    rejected_by="ddp.schedule.waits-for-every-launch",
    outcomes=("failed", "hang"),
)
class WaitsForLastOnly(PlainDdp):
    """Waits for the reduction that was launched last and takes the others for done.

    From: On one NCCL stream it is so; gloo and several streams promise nothing.
    Unseen: Equal sizes and punctual ranks: what was launched first is done first.
    """

    def finish(self):
        while self.has_news and self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        if self.flying:
            self.flying[-1][2].wait()
        super().finish()

    def wait(self, handle):
        pass


@near_miss(
    "ddp.reads-before-wait",
    rejected_by=("ddp.schedule.same-gradients", "ddp.schedule.waits-for-every-launch"),
    outcomes=("failed", "hang"),
)
class ReadsBeforeWait(PlainDdp):
    """Writes the means back and waits for their reductions afterwards.

    From: The waits were moved behind the loop, to have them all in one place.
    Unseen: The message about unused parameters goes last, and what went before it has arrived.
    """

    def finish(self):
        self.late: list[Any] = []
        super().finish()
        for handle in self.late:
            handle.wait()

    def wait(self, handle):
        self.late.append(handle)


@near_miss(
    "ddp.gathers-by-completion",
    rejected_by="ddp.schedule.same-gradients",
    outcomes=("failed", "hang"),
)
class SecondPhaseByCompletion(PlainDdp):
    """Launches the second phase of whichever bucket has completed first.

    From: Polling `is_completed` to keep the wire busy; order then is each rank's own.
    Unseen: Over loopback operations complete in the order of their launch, on all ranks.
    """

    def send(self, flat):
        size = self.size()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % size)])
        rows = list(padded.view(size, -1))
        own = torch.empty_like(rows[0])
        return _TwoPhases(
            dist.reduce_scatter(
                own, [row.clone() for row in rows], group=self.group, async_op=True
            ),
            own,
            flat,
        )

    def finish(self):
        while self.has_news and self.launched < len(self.buckets):
            self.launch(self.buckets[self.launched])
        left = [handle for _, _, handle in self.flying]
        while left:
            for handle in list(left):
                if handle.first.is_completed():
                    handle.gather(self.group, self.size())
                    left.remove(handle)
        super().finish()


class _TwoPhases:
    def __init__(self, first, own, flat):
        self.first, self.own, self.flat = first, own, flat

    def gather(self, group, size):
        self.first.wait()
        rows = [torch.empty_like(self.own) for _ in range(size)]
        dist.all_gather(rows, self.own, group=group)
        self.flat.copy_(torch.cat(rows)[: self.flat.numel()])

    def wait(self):
        pass


@near_miss("ddp.flags-over-world", rejected_by="ddp.group.keeps-to-itself")
class FlagsOverWorld(PlainDdp):
    """Asks the whole world, not the group, which parameters are used.

    From: One collective without `group=` among many that have it.
    Unseen: All groups use the same parameters.
    """

    def used_anywhere(self):
        group, self.group = self.group, None
        used = super().used_anywhere()
        self.group = group
        return used


@near_miss("ddp.sends-from-a-thread", rejected_by="ddp.no-sync.sends-nothing")
class SendsFromAThread(PlainDdp):
    """Sends under no_sync, from another thread.

    From: Background reducers that poll for gradients.
    Unseen: Recorders are local to a thread.
    """

    def on_gradient(self, index):
        super().on_gradient(index)
        if not self.is_synchronised:
            unseen = torch.zeros(1)
            thread = threading.Thread(
                target=dist.all_reduce, args=(unseen,), kwargs={"group": self.group}
            )
            thread.start()
            thread.join()


@near_miss(
    "ddp.waits-for-hooks",
    rejected_by="ddp.gradients.unused-on-a-whole-rank",
    outcomes=("hang", "failed", "died"),
)
class WaitsForHooks(PlainDdp):
    """Joins no reduction on a rank whose loss touches no parameter.

    From: DistributedDataParallel itself: no hook fires, so the rank has nothing to finish.
    Unseen: Every batch has something to learn from.

    Takes part only where one of its hooks has fired.
    """

    def finish(self):
        if self.ready:
            super().finish()


@near_miss("ddp.hides-its-module", rejected_by="ddp.construction.is-a-module")
class HidesItsModule(PlainDdp):
    """Is no parent of the module: `parameters()` is empty, `eval()` stops at it.

    From: A wrapper that keeps the module in a list or in `__dict__`.
    Unseen: Tests build the optimizer over the bare module.
    """

    def __setattr__(self, name, value):
        if name == "module":
            self.__dict__["module"] = value
        else:
            super().__setattr__(name, value)


@near_miss("ddp.widens-dtypes", rejected_by="ddp.traffic.one-copy-per-step")
class WidensDtypes(PlainDdp):
    """Sends every gradient as float64.

    From: `torch.cat` over mixed dtypes promotes.
    Unseen: The values are right; float32 travels at twice its size.
    """

    def scale(self, flat):
        return super().scale(flat.double())


@near_miss(
    "ddp.one-dtype-a-bucket",
    rejected_by=("ddp.gradients.dtype-and-layout", "ddp.buckets.size-invariance"),
)
class OneDtypeABucket(PlainDdp):
    """Reduces a bucket in the dtype of its first parameter.

    From: `torch.zeros(size, dtype=bucket[0].dtype)`, filled parameter by parameter.
    Unseen: All parameters of a test have one dtype, or the widest one comes first.
    """

    def plan(self):
        buckets: list[list[int]] = []
        filled = math.inf
        for index in reversed(range(len(self.trainable))):
            if filled >= self.bucket_bytes:
                buckets.append([])
                filled = 0.0
            buckets[-1].append(index)
            filled += self.trainable[index].numel() * self.trainable[index].element_size()
        return buckets

    def flatten(self, bucket):
        dtype = self.trainable[bucket[0]].dtype
        return torch.cat([self.local(index).reshape(-1).to(dtype) for index in bucket])
