"""Right but unusual ways to clip: every clause up to level `correct` must accept these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.clip_norm import GathersGradients
from spec_tests.impostors.plain_clip import PlainClip, offer


class AsksEveryone(PlainClip):
    """Sends its norm even where all ranks have the whole gradient, and takes the largest."""

    def norm(self) -> torch.Tensor:
        norm = super().norm()
        if not any(map(self.is_divided, self.gradients)):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm


class RefusesMixtures(PlainClip):
    def norm(self) -> torch.Tensor:
        if len({isinstance(gradient, DTensor) for gradient in self.gradients}) > 1:
            raise ValueError("expected parameters to be all plain or all DTensors, got both")
        return super().norm()


def _benign(clip: type[PlainClip], words: str, does: str) -> Impostor:
    return Impostor(f"benign.clip-{words}", does, "", "", (), functions=lambda: offer(clip))


IMPOSTORS = (
    _benign(PlainClip, "plain", "The base of the near-misses: gathers parts, adds in rank order."),
    _benign(AsksEveryone, "asks-everyone", "Agrees on the norm of replicated gradients too."),
    _benign(GathersGradients, "gathers-gradients", "Takes the norm of gathered gradients."),
    _benign(RefusesMixtures, "refuses-mixtures", "Refuses plain tensors beside DTensors."),
)
