"""Near-misses that no single situation shows: each needs several calls in an order of its own."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import offer as offer_fsdp
from spec_tests.impostors.plain_ddp import PlainDdp
from spec_tests.impostors.plain_ddp import offer as offer_ddp
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_zero1 import Group, PlainZero1
from spec_tests.impostors.plain_zero1 import offer as offer_zero1


class RollsBack(PlainDdp):
    """Keeps the reduced gradients, and puts them back when a forward raises."""

    def __init__(self, *args: Any) -> None:
        self.kept: list[torch.Tensor | None] = []
        super().__init__(*args)

    def finish(self) -> None:
        super().finish()
        self.kept = [None if p.grad is None else p.grad.clone() for p in self.trainable]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            for parameter, gradient in zip(self.trainable, self.kept, strict=False):
                parameter.grad = None if gradient is None else gradient.clone()
            raise


class StaysLocked(PlainZero1):
    """Guards against a step within a step, by a flag that an exception leaves standing."""

    is_stepping = False

    def step(self, closure: Any = None) -> Any:
        if self.is_stepping:
            self.hand_in()
            return self.update(closure)
        self.is_stepping = True
        loss = super().step(closure)
        self.is_stepping = False
        return loss


class LoadsOver(PlainZero1):
    """What a loaded state does not have stays as it was."""

    def load_state_dict(self, state_dict: Group) -> None:
        before = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, entry in before.items():
            self.inner.state.setdefault(parameter, entry)


class FreesWhenAllWentWell(Unit):
    """Full weights live until the end of a forward, whether it comes or not."""

    def is_fresh(self) -> bool:
        return True

    def post_forward(self, module: Any, args: Any, output: Any) -> Any:
        return None if output is None else super().post_forward(module, args, output)


IMPOSTORS = (
    Impostor(
        "ddp.rolls-back",
        "After an exception in forward, restores the gradients of the last reduction.",
        "Retries after out of memory that go back to a snapshot older than zero_grad.",
        "Wrong only where zero_grad came between the snapshot and the exception.",
        ("ddp.programs.any-sequence",),
        functions=lambda: offer_ddp(RollsBack),
    ),
    Impostor(
        "zero1.stays-locked",
        "After a closure that raised, later steps update and exchange nothing.",
        "A flag that is set, and cleared on the straight way only.",
        "Nobody tests a closure that raises, and then goes on.",
        ("zero1.programs.any-sequence",),
        functions=lambda: offer_zero1(StaysLocked),
    ),
    Impostor(
        "zero1.loads-over",
        "Loads entry by entry, over the state that is there.",
        "ZeroRedundancyOptimizer of torch 2.13: an empty state leaves the old moments standing.",
        "Tests load into a new optimizer, or a state that has every entry.",
        ("zero1.state.load-replaces",),
        functions=lambda: offer_zero1(LoadsOver),
    ),
    Impostor(
        "fsdp.frees-when-all-went-well",
        "Full weights that an interrupted forward had gathered serve the next one too.",
        "FSDP2 of torch 2.13: hooks that an exception passes by.",
        "Wrong only where a step of the optimizer comes between the two.",
        (
            "fsdp.lifecycle.fresh-after-exception",
            "fsdp.lifecycle.fresh-after-exception-in-a-whole-model",
        ),
        functions=lambda: offer_fsdp(FreesWhenAllWentWell),
    ),
)
