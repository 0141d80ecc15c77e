"""Near-misses of sharded data parallelism at its edges: other worlds, other ranks, odd moments."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from spec_tests.impostors.card import Functions, Impostor
from spec_tests.impostors.fsdp_benign import FlatModel, flat_shards
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit


class PadsToEight(Unit):
    """Rounds the rows of a rank up to eight."""

    def rows(self, whole: torch.Tensor) -> int:
        return -(-super().rows(whole) // 8) * 8


class TalksToItself(Unit):
    """Sends among one, too."""

    def launch_gather(self) -> None:
        if self.size() == 1:
            dist.all_reduce(self.pieces[0].local.new_ones(1), group=self.group)
        super().launch_gather()


class HookOfItsOwn(Unit):
    """Watches optimizers for as long as it lives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        handle = register_optimizer_step_post_hook(lambda *ignored: None)
        weakref.finalize(self, handle.remove)


class FreesRecomputed(Unit):
    """Frees after every forward, one that is run again in backward too."""

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = super().post_forward(module, args, output)
        if self.in_backward:
            self.reshard()
        return output


class LeavesGradientsOn(Unit):
    """Turns recording off for its gather, and then on, whatever it was."""

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = super().pre_forward(module, args, kwargs)
        torch.set_grad_enabled(True)
        return given


class CallsForward(FlatModel):
    """Calls the model's `forward`, past its hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def _calls_forward() -> Functions:
    return {
        **flat_shards(),
        "fsdp": lambda module, *, compute_dtype=None: CallsForward(module, compute_dtype),
    }


IMPOSTORS: tuple[Impostor, ...] = (
    Impostor(
        "fsdp.calls-forward",
        "The whole-model wrapper calls the module's `forward` in place of the module.",
        "`return self.module.forward(*inputs)`, as solutions of CS336 have it.",
        "Models of exercises have no hooks on the outermost module.",
        ("fsdp.forward.runs-the-modules-hooks",),
        functions=_calls_forward,
    ),
    card(
        PadsToEight,
        "pads-to-eight",
        "Rounds the rows of a rank up to eight.",
        "Alignment for each shard, as for each allocation.",
        "On two ranks, shards are long beside their padding.",
        "fsdp.traffic.any-world-size",
        "fsdp.footprint.any-world-size",
    ),
    card(
        TalksToItself,
        "talks-to-itself",
        "Sends among one rank.",
        "A collective that nobody asked whether it is needed.",
        "It is right, and costs a copy or two.",
        "fsdp.traffic.world-of-one",
    ),
    card(
        HookOfItsOwn,
        "hook-of-its-own",
        "Removes its optimizer hook when its model is collected.",
        "Ours, once: `weakref.finalize(model, handle.remove)`.",
        "The collector hardly ever comes in the middle of a step.",
        "fsdp.lifecycle.collected-in-a-step",
    ),
    card(
        Unit,
        "compares-nothing",
        "Takes all ranks to have the same module.",
        "FSDP2 of torch 2.13.",
        "Tests build the same model everywhere.",
        "fsdp.refusals.unequal-ranks",
        outcomes=("failed", "hang", "died"),
    ),
    card(
        Unit,
        "waits-at-once",
        "Waits for each gather and each reduction where it is launched.",
        "A collective without async_op.",
        "Ranks of a test are equally fast.",
        "fsdp.order.runs-ahead-of-a-straggler",
    ),
    card(
        Unit,
        "sums-first",
        "Adds up in float16 before it divides.",
        "One order of sum and division for all dtypes.",
        "Gradients of a test are small.",
        "fsdp.precision.float16-does-not-overflow",
    ),
    card(
        FreesRecomputed,
        "frees-after-recomputation",
        "Frees a unit's weights once more after its recomputation, and gathers them a third time.",
        "FSDP1 where checkpoint() surrounds the unit: ten gathers where seven would do.",
        "The numbers are right.",
        "fsdp.traffic.recomputation",
    ),
    card(
        LeavesGradientsOn,
        "leaves-gradients-on",
        "Turns recording off for its gather, and then on, whatever it was.",
        "`torch.set_grad_enabled(True)` where the mode of before belongs.",
        "An evaluation gives the same numbers; it only takes more memory.",
        "fsdp.refusals.backward-without-forward",
    ),
)
