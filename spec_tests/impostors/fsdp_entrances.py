"""Near-misses of sharded data parallelism at its other entrances, and of what it should leave."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit


class RegistersNothing(Unit):
    """Takes the registration of a method, and does nothing about it."""

    registers = False


class FreesUnderItsCaller(Unit):
    """Ends a registered method as it ends a forward, in the middle of a forward as well."""

    @property
    def is_running(self) -> bool:
        return False

    @is_running.setter
    def is_running(self, value: bool) -> None:
        pass


class LocalForShard(Unit):
    """Leaves plain rows in the module between steps."""

    def register(self, *, sharded: bool) -> None:
        super().register(sharded=sharded)
        if sharded and self.gathered is not None:
            for piece in self.pieces:
                for owner, name in piece.places:
                    owner._parameters[name] = nn.Parameter(piece.local)


class IgnoresNothing(Unit):
    """Shards what it should leave."""

    def managed(self) -> Any:
        self.ignored.clear()
        return super().managed()


class ReducesIgnored(Unit):
    """Averages whatever has a gradient."""

    def end_of_backward(self) -> None:
        super().end_of_backward()
        for parameter in self.module.parameters():
            if id(parameter) in self.ignored and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


IMPOSTORS: tuple[Impostor, ...] = (
    card(
        RegistersNothing,
        "registers-nothing",
        "Takes the registration of a method, and does nothing about it.",
        "FSDP1, whose hooks know forward alone: generate() and encode() find shards.",
        "Tests call the module.",
        "fsdp.lifecycle.registered-method",
    ),
    card(
        FreesUnderItsCaller,
        "frees-under-its-caller",
        "Ends a registered method as it ends a forward, in the middle of a forward as well.",
        "FSDP2 of torch 2.13, with reshard_after_forward=True.",
        "A forward seldom computes on after the method that it calls.",
        "fsdp.lifecycle.registered-method",
    ),
    card(
        LocalForShard,
        "local-for-shard",
        "Leaves plain rows in the module between steps, where a DTensor would object.",
        "Shards as plain Parameters, as courses have them: an embedding finds its first rows.",
        "A wrong shape raises in most layers.",
        "fsdp.refusals.unregistered-method",
    ),
    card(
        IgnoresNothing,
        "ignores-nothing",
        "Shards the parameters that it should leave.",
        "An option that is taken and not read.",
        "Outputs are the same.",
        "fsdp.init.ignored-parameters",
    ),
    card(
        ReducesIgnored,
        "reduces-ignored",
        "Averages the gradients of what it should leave.",
        "A loop over all parameters at the end of backward, for those that no hook has reached.",
        "With equal batches on all ranks the mean is each one's own.",
        "fsdp.traffic.ignored-parameters",
    ),
)
