"""Near-misses of sharded data parallelism that compute right: what they send, and when."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Piece


class GathersTwice(Unit):
    """Gathers everything twice."""

    def send_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        super().send_gather(whole, own).wait()
        return super().send_gather(whole, own)


class FreesInWindows(Unit):
    """Frees after every backward, whatever was set."""

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self.reshard_after_backward = True
        return super().pre_backward(gradient)


class SendsFrozen(Unit):
    """Reduces zeros for frozen parameters."""

    def reduce(self, pieces: list[Piece]) -> None:
        super().reduce(pieces)
        frozen = sum(p.parameter.numel() for p in self.pieces if not p.parameter.requires_grad)
        if pieces and frozen:
            dist.all_reduce(pieces[0].local.new_zeros(frozen), group=self.group)


class OneByOne(Unit):
    """Sends parameter by parameter."""

    def by_dtype(self) -> list[list[Piece]]:
        return [[piece] for piece in self.pieces]

    def reduce(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            super().reduce([piece])


class AsksItsPeers(Unit):
    """Lets the first two ranks agree on something by themselves."""

    peers: Any = None

    def end_of_backward(self) -> None:
        super().end_of_backward()
        if self.peers is None:
            self.peers = dist.new_group([0, 1])
        if self.rank() < 2:
            dist.all_reduce(torch.zeros(1), group=self.peers)


class WaitsAfterUpdate(Unit):
    """Lets all ranks meet after each update."""

    has_hook: ClassVar[list[Any]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.has_hook:
            self.has_hook.append(register_optimizer_step_post_hook(lambda *ignored: dist.barrier()))


class GathersAnew(Unit):
    """Gathers whenever it is asked to unshard."""

    def is_fresh(self) -> bool:
        return False


class NoPrefetch(Unit):
    """Gathers each unit in backward when it is needed."""

    def next_in_backward(self) -> list[Unit]:
        return self.backward_prefetch or []


class ReducesAfterBackward(Unit):
    """Reduces all units at the end of backward."""

    def post_backward(self) -> None:
        pass


class IgnoresHints(Unit):
    """Stores hints and never reads them."""

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.forward_prefetch, self.backward_prefetch = [], None
        return super().pre_forward(module, args, kwargs)


class SharesPrefetch(Unit):
    """Takes what was gathered ahead for its own, whoever it was gathered for."""

    ahead: ClassVar[list[Any]] = []

    def prefetch(self) -> None:
        super().prefetch()
        if self.flying is not None:
            self.ahead.append(self)

    def unshard(self) -> None:
        if not self.is_unsharded and self.ahead:
            other = self.ahead.pop(0)
            if other is not self and other.flying is not None and self.flying is None:
                self.flying, other.flying = (self.version(), other.flying[1]), None
        super().unshard()


_RIGHT = "The numbers are right."

IMPOSTORS: tuple[Impostor, ...] = (
    card(
        GathersTwice,
        "gathers-twice",
        "Gathers everything twice.",
        "A gather in a hook of the module and one in a hook of its parent.",
        _RIGHT,
        "fsdp.traffic.copies-per-step",
    ),
    card(
        FreesInWindows,
        "frees-in-windows",
        "Frees after every backward.",
        "`set_reshard_after_backward` sets an attribute that nobody reads.",
        _RIGHT,
        "fsdp.traffic.copies-per-window",
    ),
    card(
        SendsFrozen,
        "sends-frozen",
        "Reduces zeros for frozen parameters.",
        "One flat buffer for the whole unit.",
        "The result is thrown away; fine-tuning pays for the whole model.",
        "fsdp.traffic.frozen-not-reduced",
    ),
    card(
        OneByOne,
        "one-by-one",
        "Sends parameter by parameter.",
        "A loop over parameters around a collective.",
        _RIGHT,
        "fsdp.traffic.one-gather-per-unit",
    ),
    card(
        AsksItsPeers,
        "asks-its-peers",
        "Sends something among the ranks that have rows alone.",
        "pytorch issue 174862.",
        "With rows on every rank all do the same.",
        "fsdp.traffic.same-on-all-ranks",
    ),
    card(
        WaitsAfterUpdate,
        "waits-after-update",
        "Lets all ranks meet after each update.",
        "A barrier that once cured a race.",
        _RIGHT,
        "fsdp.traffic.update-is-silent",
    ),
    card(
        GathersAnew,
        "gathers-anew",
        "Gathers what is unsharded already.",
        "No state that says that the full weights are there.",
        _RIGHT,
        "fsdp.traffic.unsharded-once",
    ),
    card(
        NoPrefetch,
        "no-prefetch",
        "Gathers each unit in backward when it is needed.",
        "The straightforward hook.",
        _RIGHT,
        "fsdp.order.gathers-ahead-in-backward",
    ),
    card(
        ReducesAfterBackward,
        "reduces-after-backward",
        "Reduces all units at the end of backward.",
        "One callback in place of a hook for each unit.",
        _RIGHT,
        "fsdp.order.reduces-during-backward",
    ),
    card(
        IgnoresHints,
        "ignores-hints",
        "Stores hints and never reads them.",
        "A setter that was written for the signature's sake.",
        _RIGHT,
        "fsdp.order.hints-are-followed",
    ),
    card(
        SharesPrefetch,
        "shares-prefetch",
        "Takes what was gathered ahead for its own.",
        "One slot for what is on its way, in place of one for each unit.",
        "Where hints name the next unit, it is right.",
        "fsdp.order.hints-change-no-bit",
    ),
)
