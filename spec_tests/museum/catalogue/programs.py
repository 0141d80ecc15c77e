"""Near-misses that no single situation shows: each needs several calls in an order of its own."""

from __future__ import annotations

import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.fully_shard import PlainFsdp
from spec_tests.plain.zero1 import PlainZero1


@near_miss("ddp.rolls-back", rejected_by="ddp.programs.any-situation")
class RollsBack(PlainDdp):
    """After an exception in forward, restores the gradients of the last reduction.

    From: Retries after out of memory that go back to a snapshot older than zero_grad.
    Unseen: Wrong only where zero_grad came between the snapshot and the exception.
    """

    def __init__(self, *args):
        self.kept: list[torch.Tensor | None] = []
        super().__init__(*args)

    def finish(self):
        super().finish()
        self.kept = [None if p.grad is None else p.grad.clone() for p in self.trainable]

    def forward(self, *args, **kwargs):
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            for parameter, gradient in zip(self.trainable, self.kept, strict=False):
                parameter.grad = None if gradient is None else gradient.clone()
            raise


@near_miss("zero1.stays-locked", rejected_by="zero1.programs.any-situation")
class StaysLocked(PlainZero1):
    """After a closure that raised, later steps update and exchange nothing.

    From: A flag that is set, and cleared on the straight way only.
    Unseen: Nobody tests a closure that raises, and then goes on.
    """

    is_stepping = False

    def step(self, closure=None):
        if self.is_stepping:
            self.hand_in()
            return self.update(closure)
        self.is_stepping = True
        loss = super().step(closure)
        self.is_stepping = False
        return loss


@near_miss("zero1.rates-of-the-last-step", rejected_by="zero1.programs.any-situation")
class RatesOfTheLastStep(PlainZero1):
    """With a group that is added, shows the options that the inner optimizer had in its last step.

    From: ours, until drawn programs met it, and `plain` the same.
    Unseen: Rates change before a step, and groups are added at the start.
    """

    is_growing = False

    def add_param_group(self, param_group):
        self.is_growing = True
        super().add_param_group(param_group)
        self.is_growing = False

    def hand_in(self):
        if not self.is_growing:
            super().hand_in()


@near_miss("zero1.loads-over", rejected_by="zero1.state.load-replaces")
class LoadsOver(PlainZero1):
    """Loads entry by entry, over the state that is there.

    From: ZeroRedundancyOptimizer of torch 2.13: an empty state leaves the old moments standing.
    Unseen: Tests load into a new optimizer, or a state that has every entry.
    """

    def load_state_dict(self, state_dict):
        before = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, entry in before.items():
            self.inner.state.setdefault(parameter, entry)


@near_miss(
    "fsdp.frees-when-all-went-well",
    rejected_by=(
        "fsdp.lifecycle.fresh-after-exception",
        "fsdp.lifecycle.fresh-after-exception-in-a-whole-model",
    ),
)
class FreesWhenAllWentWell(PlainFsdp):
    """Full weights that an interrupted forward had gathered serve the next one too.

    From: FSDP2 of torch 2.13: hooks that an exception passes by.
    Unseen: Wrong only where a step of the optimizer comes between the two.
    """

    def is_fresh(self):
        return True

    def post_forward(self, module, args, output):
        return None if output is None else super().post_forward(module, args, output)
