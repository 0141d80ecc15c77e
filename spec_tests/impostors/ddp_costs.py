"""Near-misses of traffic, overlap, footprint and life cycle: the first step looks perfect."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class ReducesTwice(PlainDdp):
    def send(self, flat: torch.Tensor) -> Any:
        dist.all_reduce(flat, group=self.group)
        flat /= self.size()
        return super().send(flat)


class PadsBuckets(PlainDdp):
    def flatten(self, bucket: list[int]) -> torch.Tensor:
        flat = super().flatten(bucket)
        return torch.cat([flat, flat.new_zeros(256 - flat.numel() % 256)])

    def cut(self, bucket: list[int], flat: torch.Tensor) -> list[torch.Tensor]:
        used = sum(self.trainable[index].numel() for index in bucket)
        return super().cut(bucket, flat[:used])


class SendsFrozen(PlainDdp):
    def send(self, flat: torch.Tensor) -> Any:
        for parameter in self.module.parameters():
            if not parameter.requires_grad and self.launched == 1:
                dist.all_reduce(torch.zeros_like(parameter), group=self.group)
        return super().send(flat)


class OneBucket(PlainDdp):
    def plan(self) -> list[list[int]]:
        self.bucket_bytes = float("inf")
        return super().plan()


class SizeInElements(PlainDdp):
    def plan(self) -> list[list[int]]:
        self.bucket_bytes *= 8  # the size counts elements, and these have eight bytes
        return super().plan()


class OffsetByRows(PlainDdp):
    """Advances by the number of rows where it should advance by the number of elements."""

    def cut(self, bucket: list[int], flat: torch.Tensor) -> list[torch.Tensor]:
        pieces, offset = [], 0
        for index in bucket:
            parameter = self.trainable[index]
            end = min(offset + parameter.numel(), flat.numel())
            pieces.append(flat[end - parameter.numel() : end].view(parameter.shape))
            offset += parameter.shape[0]
        return pieces


class ReducesAfterBackward(PlainDdp):
    def launch_what_is_ready(self) -> None:
        pass


class BlocksInHook(PlainDdp):
    def send(self, flat: torch.Tensor) -> Any:
        handle = super().send(flat)
        handle.wait()
        return handle


class ModuleGlobals(PlainDdp):
    """Keeps its state in a dictionary that all wrapped models share."""

    shared: ClassVar[dict[str, Any]] = {}

    def new_round(self) -> None:
        self.shared.update(ready=set(), flying=[], launched=0, has_news=False)

    def __getattr__(self, name: str) -> Any:
        if name in ("ready", "flying", "launched", "has_news"):
            return self.shared[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("ready", "flying", "launched", "has_news"):
            self.shared[name] = value
        else:
            super().__setattr__(name, value)


class NeverResets(PlainDdp):
    """Forgets to clear the ready set and what flies when a backward was interrupted."""

    def before_training_forward(self) -> None:
        if self.module.training:
            self.take_first(list(self.module.buffers()))


class BuffersOnceOnly(PlainDdp):
    def before_training_forward(self) -> None:
        if self.flying:
            super().before_training_forward()


class KeepsOldBuckets(PlainDdp):
    """Keeps every bucket of the last two rounds alive."""

    def __init__(self, *args: Any) -> None:
        self.kept: list[torch.Tensor] = []
        super().__init__(*args)

    def finish(self) -> None:
        self.kept = [*self.kept, *(flat for _, flat, _ in self.flying)][-2 * len(self.buckets) :]
        super().finish()


class ClipsOnItsOwn(PlainDdp):
    """Clips to the norm of its own gradient in front of the reduction's result."""

    def finish(self) -> None:
        local = [p.grad.norm() for p in self.trainable if p.grad is not None]
        news = self.has_news
        super().finish()
        if news and local:
            norm = torch.stack(local).norm()
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, 0.1 / float(norm))


class Dithers(PlainDdp):
    """Rounds stochastically, with a generator that nobody seeds."""

    generator: ClassVar[torch.Generator] = torch.Generator()

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(flat.shape, generator=self.generator).to(flat.dtype) - 0.5
        return super().scale(flat) * (1 + noise * 2 * torch.finfo(flat.dtype).eps)


class WrapsACopy(PlainDdp):
    """Trains a copy; the original Parameter objects, which the optimizer has, see nothing."""

    def __init__(self, module: nn.Module, *rest: Any) -> None:
        import copy

        super().__init__(copy.deepcopy(module), *rest)
        self.take_first(list(module.parameters()))


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


IMPOSTORS = (
    _card(
        ReducesTwice,
        "reduces-twice",
        "Reduces every bucket twice.",
        "A reduction in the hook and one in the trainer.",
        "The mean of equal means is the same.",
        "ddp.traffic.one-copy-per-step",
    ),
    _card(
        PadsBuckets,
        "pads-buckets",
        "Pads every bucket to 256 elements.",
        "Alignment for a kernel that is not used here.",
        "The padding is cut off again.",
        "ddp.traffic.one-copy-per-step",
        "ddp.traffic.bucket-capacity",
    ),
    _card(
        SendsFrozen,
        "sends-frozen",
        "Sends zeros for frozen parameters.",
        "Flattening `p.grad` of all parameters.",
        "The result is thrown away; fine-tuning pays for the whole model.",
        "ddp.traffic.frozen-not-sent",
    ),
    _card(
        OneBucket,
        "one-bucket",
        "Ignores the bucket size: one bucket holds all.",
        "The argument is stored and never read.",
        "The gradients are right; nothing overlaps.",
        "ddp.traffic.bucket-count",
        "ddp.overlap.starts-during-backward",
    ),
    _card(
        SizeInElements,
        "size-in-elements",
        "Takes the bucket size for a number of elements.",
        "`numel()` where `numel() * element_size()` is meant.",
        "Buckets are eight times too large; nobody counts them.",
        "ddp.traffic.bucket-capacity",
    ),
    _card(
        OffsetByRows,
        "offset-by-rows",
        "Cuts the flat bucket at offsets that count rows.",
        "`shape[0]` in place of `numel()`.",
        "With one parameter per bucket every offset is zero.",
        "ddp.buckets.size-invariance",
    ),
    _card(
        ReducesAfterBackward,
        "reduces-after-backward",
        "Reduces everything after backward.",
        "The naive wrapper of every course, sold as overlapped.",
        "The numbers are right.",
        "ddp.overlap.starts-during-backward",
    ),
    _card(
        BlocksInHook,
        "blocks-in-hook",
        "Waits for each reduction inside the hook.",
        "`dist.all_reduce(...)` without `async_op=True`.",
        "The order of events is that of an overlapped wrapper.",
        "ddp.overlap.hooks-do-not-block",
    ),
    _card(
        ModuleGlobals,
        "module-globals",
        "Keeps its state in a dictionary that all models share.",
        "Global process-group and reducer managers.",
        "Tests wrap one model at a time.",
        "ddp.lifecycle.two-models",
        outcomes=("failed", "hang", "died"),
    ),
    _card(
        NeverResets,
        "never-resets",
        "Keeps the ready set of a backward that was interrupted.",
        "picotron: a forgotten `reset()`.",
        "No test raises in backward.",
        "ddp.lifecycle.after-exception",
        outcomes=("failed", "hang", "died"),
    ),
    _card(
        BuffersOnceOnly,
        "buffers-once-only",
        "Broadcasts buffers at construction and never again.",
        "`broadcast_buffers` left out.",
        "Running statistics drift apart slowly.",
        "ddp.lifecycle.buffers-follow-first-rank",
    ),
    _card(
        KeepsOldBuckets,
        "keeps-old-buckets",
        "Keeps the buckets of the last rounds alive.",
        "A list of handles that holds on to its tensors.",
        "Only a model that nearly fills the device notices.",
        "ddp.footprint.gradients",
    ),
    _card(
        ClipsOnItsOwn,
        "clips-on-its-own",
        "Clips each rank by its own norm.",
        "The norm is taken in front of the reduction.",
        "Each rank's curve looks healthy.",
        "ddp.training.ranks-stay-equal",
    ),
    _card(
        Dithers,
        "dithers",
        "Rounds stochastically with a generator that nobody seeds.",
        "Stochastic rounding in gradient compression.",
        "The error is one unit in the last place.",
        "ddp.training.repeatable",
    ),
    _card(
        WrapsACopy,
        "wraps-a-copy",
        "Trains a deep copy of the module.",
        "Wrappers that rebuild the module on a device.",
        "Tests read the gradients through the wrapper.",
        "ddp.gradients.mean",
        "ddp.training.equals-full-batch",
    ),
)
