"""Near-misses of traffic, overlap, footprint and life cycle: the first step looks perfect."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.plain.ddp import PlainDdp


@near_miss("ddp.reduces-twice", rejected_by="ddp.traffic.one-copy-per-step")
class ReducesTwice(PlainDdp):
    """Reduces every bucket twice.

    From: A reduction in the hook and one in the trainer.
    Unseen: The mean of equal means is the same.
    """

    def send(self, flat):
        dist.all_reduce(flat, group=self.group)
        flat /= self.size()
        return super().send(flat)


@near_miss("ddp.sends-frozen", rejected_by="ddp.traffic.frozen-not-sent")
class SendsFrozen(PlainDdp):
    """Sends zeros for frozen parameters.

    From: Flattening `p.grad` of all parameters.
    Unseen: The result is thrown away; fine-tuning pays for the whole model.
    """

    def send(self, flat):
        for parameter in self.module.parameters():
            if not parameter.requires_grad and self.launched == 1:
                dist.all_reduce(torch.zeros_like(parameter), group=self.group)
        return super().send(flat)


@near_miss(
    "ddp.one-bucket", rejected_by=("ddp.traffic.bucket-count", "ddp.overlap.starts-during-backward")
)
class OneBucket(PlainDdp):
    """Ignores the bucket size: one bucket holds all.

    From: The argument is stored and never read.
    Unseen: The gradients are right; nothing overlaps.
    """

    def plan(self):
        self.bucket_bytes = float("inf")
        return super().plan()


@near_miss("ddp.size-in-elements", rejected_by="ddp.traffic.bucket-capacity")
class SizeInElements(PlainDdp):
    """Takes the bucket size for a number of elements.

    From: `numel()` where `numel() * element_size()` is meant.
    Unseen: Buckets are eight times too large; nobody counts them.
    """

    def plan(self):
        self.bucket_bytes *= 8  # the size counts elements, and these have eight bytes
        return super().plan()


@near_miss("ddp.reduces-after-backward", rejected_by="ddp.overlap.starts-during-backward")
class ReducesAfterBackward(PlainDdp):
    """Reduces everything after backward.

    From: The naive wrapper of every course, sold as overlapped.
    Unseen: The numbers are right.
    """

    def launch_what_is_ready(self):
        pass


@near_miss("ddp.blocks-in-hook", rejected_by="ddp.overlap.hooks-do-not-block")
class BlocksInHook(PlainDdp):
    """Waits for each reduction inside the hook.

    From: `dist.all_reduce(...)` without `async_op=True`.
    Unseen: The order of events is that of an overlapped wrapper.
    """

    def send(self, flat):
        handle = super().send(flat)
        handle.wait()
        return handle


@near_miss(
    "ddp.module-globals",
    rejected_by="ddp.lifecycle.two-models",
    outcomes=("failed", "hang", "died"),
)
class ModuleGlobals(PlainDdp):
    """Keeps its state in a dictionary that all models share.

    From: Global process-group and reducer managers.
    Unseen: Tests wrap one model at a time.
    """

    shared: ClassVar[dict[str, Any]] = {}

    def new_round(self):
        self.shared.update(ready=set(), flying=[], launched=0, has_news=False)

    def __getattr__(self, name):
        if name in ("ready", "flying", "launched", "has_news"):
            return self.shared[name]
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        if name in ("ready", "flying", "launched", "has_news"):
            self.shared[name] = value
        else:
            super().__setattr__(name, value)


@near_miss(
    "ddp.never-resets",
    rejected_by="ddp.lifecycle.after-exception",
    outcomes=("failed", "hang", "died"),
)
class NeverResets(PlainDdp):
    """Keeps the ready set of a backward that was interrupted.

    From: picotron: a forgotten `reset()`.
    Unseen: No test raises in backward.
    """

    def start_over(self):
        pass


@near_miss("ddp.buffers-once-only", rejected_by="ddp.lifecycle.buffers-follow-first-rank")
class BuffersOnceOnly(PlainDdp):
    """Broadcasts buffers at construction and never again.

    From: `broadcast_buffers` left out.
    Unseen: Running statistics drift apart slowly.
    """

    def before_training_forward(self):
        if self.flying:
            super().before_training_forward()


@near_miss("ddp.keeps-old-buckets", rejected_by="ddp.footprint.gradients")
class KeepsOldBuckets(PlainDdp):
    """Keeps the buckets of the last rounds alive.

    From: A list of handles that holds on to its tensors.
    Unseen: Only a model that nearly fills the device notices.
    """

    def __init__(self, *args):
        self.kept: list[torch.Tensor] = []
        super().__init__(*args)

    def finish(self):
        self.kept = [*self.kept, *(flat for _, flat, _ in self.flying)][-2 * len(self.buckets) :]
        super().finish()


@near_miss("ddp.clips-on-its-own", rejected_by="ddp.training.ranks-stay-equal")
class ClipsOnItsOwn(PlainDdp):
    """Clips each rank by its own norm.

    From: The norm is taken in front of the reduction.
    Unseen: Each rank's curve looks healthy.
    """

    def finish(self):
        local = [p.grad.norm() for p in self.trainable if p.grad is not None]
        news = self.has_news
        super().finish()
        if news and local:
            norm = torch.stack(local).norm()
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, 0.1 / float(norm))


@near_miss("ddp.dithers", rejected_by="ddp.training.repeatable")
class Dithers(PlainDdp):
    """Rounds stochastically with a generator that nobody seeds.

    From: Stochastic rounding in gradient compression.
    Unseen: The error is one unit in the last place.
    """

    generator: ClassVar[torch.Generator] = torch.Generator()

    def scale(self, flat):
        noise = torch.rand(flat.shape, generator=self.generator).to(flat.dtype) - 0.5
        return super().scale(flat) * (1 + noise * 2 * torch.finfo(flat.dtype).eps)


@near_miss("ddp.keeps-all-handles", rejected_by="ddp.footprint.no-growth")
class KeepsAllHandles(PlainDdp):
    """Appends to a list of what was sent, which nobody clears.

    From: `self.handles.append(...)` in the hook, and a `finish` that waits for all of them.
    Unseen: Waiting twice for a handle is harmless; memory is full after hours.
    """

    def launch(self, bucket):
        super().launch(bucket)
        self.all_handles = [*getattr(self, "all_handles", []), self.flying[-1]]
