"""Right but unusual training loops: every clause up to level `correct` must accept these.

They train what the implementation below wraps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_train import Batch, PlainTrain, offer


class ScalesAfterwards(PlainTrain):
    """Adds up plain sums; counts are reduced per micro-batch, and gradients divided at the end."""

    def step(self, number: int) -> dict[str, float]:
        self.seen = 0.0
        return super().step(number)

    def scale(self, batch: Batch, tokens: float) -> float:
        self.seen += self.total(float(self.count(batch)))
        return 1.0

    def finish(self) -> None:
        super().finish()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.size / self.seen


class ReportsObjects(PlainTrain):
    """Records are objects with tensors in them."""

    def run(self) -> list[Any]:
        return [_Record({n: torch.tensor(v) for n, v in r.items()}) for r in super().run()]


class LooksAhead(PlainTrain):
    """Has all micro-batches in hand before the first update; records are named tuples."""

    def run(self) -> list[Any]:
        whole = [next(self.batches) for _ in range(self.steps * self.accumulate)]
        self.batches = iter(whole)
        return [_Fields(**record) for record in super().run()]


class _Fields(NamedTuple):
    loss: float
    lr: float
    grad_norm: float
    tokens: float


class _Record:
    def __init__(self, fields: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(fields)


class Barriers(PlainTrain):
    """Ranks wait for each other around every step."""

    def clear(self) -> None:
        if self.is_wrapped():
            dist.barrier()
        super().clear()


def _card(loop: type[PlainTrain], words: str, does: str) -> Impostor:
    return Impostor(f"benign.train-{words}", does, "", "", (), functions=lambda: offer(loop, None))


IMPOSTORS = (
    _card(PlainTrain, "plain", "The base of the training impostors; the loss is in float32."),
    _card(ScalesAfterwards, "scales-afterwards", "Sums, counts per micro-batch, divides at last."),
    _card(ReportsObjects, "reports-objects", "Records have attributes, and tensors in them."),
    _card(LooksAhead, "looks-ahead", "Takes the data of all steps before the first."),
    _card(Barriers, "barriers", "Ranks wait for each other in every step."),
)
