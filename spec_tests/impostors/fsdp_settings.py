"""Near-misses of the settings of sharded data parallelism: taken, and not or not quite followed."""

from __future__ import annotations

import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Piece


class DropsUntilLast(Unit):
    """Reduces before the last backward, and waits for the last one only."""

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        if self.is_last_backward:
            super().assign(piece, shard)


class FinishesLate(Unit):
    """Keeps what was reduced before the last backward in a list, and adds it in the last one."""

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        if not self.is_last_backward:
            self.__dict__.setdefault("late", []).append((piece, shard))
            return
        for other, earlier in self.__dict__.pop("late", []):
            super().assign(other, earlier)
        super().assign(piece, shard)


class SkipsReplicas(Unit):
    """Without all-reduce, adds the sums over shards to the gradients, and leaves them there."""

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        replicas = self.replicas
        if not self.all_reduces:
            self.replicas = None
        try:
            return super().mean(flat)
        finally:
            self.replicas = replicas


class DividesByBoth(Unit):
    """Divides by the factor what it has averaged."""

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        own = super().mean(flat)
        return own if self.factor is None else own / self.divisor()


IMPOSTORS: tuple[Impostor, ...] = (
    card(
        DropsUntilLast,
        "drops-until-last",
        "Reduces before the last backward as well, and keeps the last one's gradients alone.",
        "A flag that skips the end of a backward, where gradients are put into their places.",
        "Windows in tests are switched by set_requires_gradient_sync.",
        "fsdp.accumulation.last-backward",
    ),
    card(
        FinishesLate,
        "finishes-late",
        "Adds what was under way to the gradients of the last backward, cleared or not.",
        "Ours, once: a reduction in flight is no gradient yet, so zero_grad finds nothing.",
        "Nobody clears in the middle of a window, but who skips a bad batch.",
        "fsdp.accumulation.clears-what-is-under-way",
    ),
    card(
        SkipsReplicas,
        "skips-replicas",
        "Puts sums over shards into the gradients, where no later all-reduce finds them.",
        "Hybrid sharding: each replica keeps the first micro-batches for itself.",
        "Losses fall, and replicas drift apart by little.",
        "fsdp.accumulation.all-reduce-at-the-last",
    ),
    card(
        Unit,
        "all-reduces-each-time",
        "Takes set_requires_all_reduce, and averages replicas after every backward.",
        "A setter that is taken and not read.",
        "The gradients are right.",
        "fsdp.accumulation.all-reduce-at-the-last",
    ),
    card(
        DividesByBoth,
        "divides-by-both",
        "Divides by the factor what it has averaged.",
        "ReduceOp.AVG with a factor on top.",
        "Adam does not care for the scale of gradients.",
        "fsdp.backward.divide-factor",
    ),
    card(
        Unit,
        "unshards-anyway",
        "Gathers in backward what it was told not to.",
        "A setter that is taken and not read.",
        "The gradients are right.",
        "fsdp.traffic.not-unsharded-in-backward",
    ),
    card(
        Unit,
        "list-as-units",
        "Makes each module of a list a unit of its own.",
        "A loop over the list.",
        "The gradients are right, unless the modules are tied.",
        "fsdp.traffic.list-is-one-unit",
        "fsdp.backward.list-of-modules",
        "fsdp.footprint.part-of-a-list",
    ),
    card(
        Unit,
        "cuts-rows-anyway",
        "Takes shard_placement_fn, and cuts along dim 0.",
        "An option that is taken and not read.",
        "Outputs are the same.",
        "fsdp.refusals.other-dims",
    ),
)
