"""Near-misses that only another order of events, thread, dtype or rank can show.

On one quiet machine operations complete in the order of their launch and long before anyone looks,
so those of schedules give right gradients there, again and again.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.ddp import PlainDdp

DDP = Source("spec_tests.plain.ddp")

DDP.near_miss(
    "ddp.waits-for-last-only",
    "ddp.schedule.waits-for-every-launch",
    "- handle.wait()",
    "+ self.flying[-1][-1].wait()",
    "  self.write_back(bucket, flat, used)",
    does="Waits for the reduction that was launched last and takes the others for done.",
    seen="On one NCCL stream it is so; gloo and several streams promise nothing.",
    unseen="With equal sizes and no stragglers, the message launched first is done first.",
    outcomes=("failed", "hang"),
)


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

    def launch(self, bucket):
        self.launched += 1
        parts = [self.local(index).reshape(-1) for index in bucket]
        flat = torch.cat(parts) / self.size()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self.size())])
        rows = [row.clone() for row in padded.view(self.size(), -1)]
        own = torch.empty_like(rows[0])
        first = dist.reduce_scatter(own, rows, group=self.group, async_op=True)
        self.flying.append((bucket, flat, _TwoPhases(first, own, flat)))

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


DDP.near_miss(
    "ddp.flags-over-world",
    "ddp.group.keeps-to-itself",
    "- dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)",
    "+ dist.all_reduce(flags, op=dist.ReduceOp.MAX)",
    does="Asks the whole world, not the group, which parameters are used.",
    seen="One collective without `group=` among many that have it.",
    unseen="All groups use the same parameters.",
)


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


DDP.near_miss(
    "ddp.waits-for-hooks",
    "ddp.gradients.unused-on-a-whole-rank",
    "- if not self.has_news:",
    "+ if not self.ready:",
    does="Joins no reduction on a rank whose loss touches no parameter.",
    seen="DistributedDataParallel itself: no hook fires, so the rank has nothing to finish.",
    unseen="Every batch has something to learn from.",
    outcomes=("hang", "failed", "died"),
)

DDP.near_miss(
    "ddp.hides-its-module",
    "ddp.construction.is-a-module",
    "- self.module = module",
    '+ self.__dict__["module"] = module',
    does="Is no parent of the module: `parameters()` is empty, `eval()` stops at it.",
    seen="A wrapper that keeps the module in a list or in `__dict__`.",
    unseen="Tests build the optimizer over the bare module.",
)

DDP.near_miss(
    "ddp.widens-dtypes",
    "ddp.traffic.one-copy-per-step",
    "+ flat = flat.double()",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    does="Sends every gradient as float64.",
    seen="`torch.cat` over mixed dtypes promotes.",
    unseen="The values are right; float32 travels at twice its size.",
)

DDP.near_miss(
    "ddp.one-dtype-a-bucket",
    ("ddp.gradients.dtype-and-layout", "ddp.buckets.size-invariance"),
    "- if not buckets or filled >= self.bucket_bytes or parameter.dtype != dtype:",
    "+ if not buckets or filled >= self.bucket_bytes:",
    "...",
    "  flat = torch.cat(parts) / self.size()",
    "+ flat = flat.to(self.trainable[bucket[0]].dtype)",
    does="Reduces a bucket in the dtype of its first parameter.",
    seen="`torch.zeros(size, dtype=bucket[0].dtype)`, filled parameter by parameter.",
    unseen="All parameters of a test have one dtype, or the widest one comes first.",
)
