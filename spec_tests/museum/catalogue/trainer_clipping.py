"""Near-misses of a trainer's clipping, learning rates and precision."""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar

import torch
from torch import nn

from spec_tests.museum.card import near_miss
from spec_tests.plain.trainer import PlainTrainer


@near_miss("trainer.clips-before-reducing", rejected_by="trainer.clip.global-norm")
class ClipsBeforeReducing(PlainTrainer):
    """Clips each rank's own gradients, and reduces them then.

    From: Clipping between backward and the end of the reduction.
    Unseen: Every rank's norm is within the limit.
    """

    def finish(self):
        super().clip()
        super().finish()

    def clip(self):
        pass

    def backward(self, loss):
        with self.model.no_sync() if self.strategy != "fsdp" else contextlib.nullcontext():
            super().backward(loss)


@near_miss("trainer.clips-each-micro-batch", rejected_by="trainer.clip.once-per-step")
class ClipsEach(PlainTrainer):
    """Clips what is accumulated after every micro-batch.

    From: Clipping inside the inner loop.
    Unseen: The norm that is logged is within the limit.
    """

    def backward(self, loss):
        super().backward(loss)
        if self.max_norm is not None and self.strategy != "fsdp":
            nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)


@near_miss("trainer.scales-up", rejected_by="trainer.clip.leaves-small-gradients")
class ScalesUp(PlainTrainer):
    """Scales every gradient to `max_norm`, smaller ones as well.

    From: A coefficient without `clamp(max=1)`.
    Unseen: Early in training every gradient is larger.
    """

    def clip(self):
        if self.max_norm is not None and self.strategy != "fsdp":
            present = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(present)
            torch._foreach_mul_(present, self.max_norm / float(norm))


@near_miss("trainer.clips-by-default", rejected_by="trainer.clip.none-is-none")
class ClipsByDefault(PlainTrainer):
    """Clips to 1.0 where nothing is said.

    From: DeepSpeed's `gradient_clipping`, which defaults to 1.0 since pull request 8068.
    Unseen: Most recipes clip to 1.0 anyway.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_norm = 1.0 if self.max_norm is None else self.max_norm


@near_miss("trainer.counts-names", rejected_by="trainer.clip.tied-counts-once")
class CountsNames(PlainTrainer):
    """Counts a tied parameter's gradient once per name in the norm.

    From: A norm over `state_dict()`, or over the parameters of each layer in turn.
    Unseen: The norm is too large by some per cent.
    """

    def clip(self):
        if self.max_norm is None or self.strategy == "fsdp":
            return
        named = self.module.named_parameters(remove_duplicate=False)
        squares = [float(p.grad.norm()) ** 2 for _, p in named if p.grad is not None]
        factor = min(1.0, self.max_norm / (math.sqrt(sum(squares)) + 1e-6))
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor


@near_miss("trainer.skips-by-its-shards", rejected_by="trainer.clip.not-finite-in-one-shard")
class SkipsByItsShards(PlainTrainer):
    """Skips the update where a gradient that this rank holds is not finite.

    From: `isfinite` over `.grad`, written for replicas, and kept for shards.
    Unseen: Most of what is not finite is so in all gradients, and on all ranks.
    """

    def update(self):
        held = [p.grad for p in self.module.parameters() if p.grad is not None]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in held]
        if all(bool(torch.isfinite(gradient).all()) for gradient in local):
            super().update()


@near_miss("trainer.skips-on-its-own", rejected_by="trainer.clip.not-finite-alike")
class SkipsOnItsOwn(PlainTrainer):
    """A rank whose own loss is NaN leaves the step out.

    From: `if not torch.isfinite(loss): continue`, as in many training scripts.
    Unseen: The ranks drift apart from there on; each one's loss falls.
    """

    def forward(self, batch):
        found = super().forward(batch)
        self.is_finite = bool(torch.isfinite(found))
        return found

    def update(self):
        if self.is_finite:
            super().update()


@near_miss("trainer.changes-the-default", rejected_by="trainer.rate.takes-effect")
class ChangesTheDefault(PlainTrainer):
    """Changes the optimizer's default rate, which only groups to come take.

    From: `optimizer.defaults["lr"] = lr`.
    Unseen: What is logged is the new rate.
    """

    def set_lr(self, factor):
        self.optimizer.defaults["lr"] = factor * self.rates[0]


@near_miss("trainer.one-rate", rejected_by="trainer.rate.every-group")
class OneRate(PlainTrainer):
    """Gives all groups the rate of the first.

    From: `for group in groups: group["lr"] = lr`, the schedule of a single group.
    Unseen: Examples have one rate.
    """

    def set_lr(self, factor):
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.rates[0]


@near_miss("trainer.zero-is-no-rate", rejected_by="trainer.rate.zero-keeps-weights")
class ZeroIsNoRate(PlainTrainer):
    """Takes a factor of zero for none.

    From: `lr = lr or default`.
    Unseen: A warm-up is at zero for one step.
    """

    def set_lr(self, factor):
        super().set_lr(factor or 1.0)


@near_miss("trainer.keeps-the-loss-scale", rejected_by="trainer.precision.near-float32")
class KeepsTheLossScale(PlainTrainer):
    """Scales the loss of a 16-bit step, and never divides the gradient again.

    From: DeepSpeed issue 7839: gradients that were divided elsewhere.
    Unseen: Adam does not feel a constant factor.
    """

    def backward(self, loss):
        super().backward(loss if self.dtype == torch.float32 else 128 * loss)


@near_miss("trainer.ignores-dtype", rejected_by="trainer.precision.computes-in-dtype")
class IgnoresDtype(PlainTrainer):
    """Computes in float32 whatever dtype is asked for.

    From: An option that a framework's configuration does not know, and drops.
    Unseen: The weights are right, and better.
    """

    def casting(self):
        return contextlib.nullcontext()


@near_miss("trainer.narrow-weights", rejected_by="trainer.precision.small-updates")
class NarrowWeights(PlainTrainer):
    """Keeps weights in bfloat16 between steps.

    From: `model.to(torch.bfloat16)` in place of autocast, without master weights.
    Unseen: The loss falls until updates are small.
    """

    narrow: ClassVar[torch.dtype] = torch.bfloat16

    @torch.no_grad()
    def update(self):
        super().update()
        if self.dtype == self.narrow and self.strategy != "fsdp":
            for parameter in self.module.parameters():
                parameter.copy_(parameter.to(self.narrow))


@near_miss("trainer.narrow-moments", rejected_by="trainer.precision.lasting-momentum")
class NarrowMoments(PlainTrainer):
    """Keeps the optimizer's state in bfloat16 between steps.

    From: Moments that are made like the gradients, or a state dict that was cast with the weights.
    Unseen: The weights are float32, and move by nearly as much.
    """

    @torch.no_grad()
    def update(self):
        super().update()
        state = self.optimizer.inner.state if self.strategy == "zero1" else self.optimizer.state
        for of_parameter in state.values() if self.dtype == torch.bfloat16 else ():
            for name, value in of_parameter.items():
                if isinstance(value, torch.Tensor):
                    of_parameter[name] = value.to(torch.bfloat16).to(value.dtype)
