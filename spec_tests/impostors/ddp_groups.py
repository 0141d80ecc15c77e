"""Near-misses of groups: the world in place of those who were asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class DividesByWorld(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / dist.get_world_size()


class FirstRankOfWorld(PlainDdp):
    def take_first(self, tensors: Sequence[torch.Tensor]) -> None:
        group, self.group = self.group, None
        super().take_first(tensors)
        self.group = group


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


IMPOSTORS = (
    _card(
        DividesByWorld,
        "divides-by-world",
        "Divides by the size of the world in place of the group.",
        "`dist.get_world_size()` without an argument; verl issue 7493 is its sibling.",
        "Tests have one group.",
        "ddp.group.divides-by-its-size",
    ),
    _card(
        FirstRankOfWorld,
        "first-rank-of-world",
        "Broadcasts over the world in place of the group.",
        "`src=0` and no group in the constructor.",
        "Tests have one group.",
        "ddp.group.starts-from-its-first-rank",
    ),
)
