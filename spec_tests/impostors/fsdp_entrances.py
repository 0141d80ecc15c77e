"""Near-misses of sharded data parallelism at its other entrances, and of what it should leave."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.fsdp_offer import card
from spec_tests.impostors.plain_fsdp import Unit
from spec_tests.impostors.plain_fsdp_storage import Piece


class RegistersNothing(Unit):
    """Takes the registration of a method, and does nothing about it."""

    registers = False


class FreesUnderItsCaller(Unit):
    """Ends a registered method as it ends a forward, in the middle of a forward as well."""

    @property
    def num_running(self) -> int:
        return 0

    @num_running.setter
    def num_running(self, value: int) -> None:
        pass


class EndsWithTheCall(Unit):
    """Ends with a forward, also with one that a method of the same module has called."""

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.num_running = 1
        return super().post_forward(module, args, output)


class TakesANameOfTheModel(Unit):
    """Notes its pass in the module under a name that anybody might use."""

    def find_root(self) -> None:
        super().find_root()
        object.__setattr__(self.module, "_schedule", self.run)


class TellsNobody(Unit):
    """Assigns gradients and calls no hook."""

    def tell(self, piece: Piece) -> None:
        pass


class ShardsWhatIsNotCalled(Unit):
    """Takes every Linear for a layer that is called."""

    leaves_attention = False


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
    card(
        EndsWithTheCall,
        "ends-with-the-call",
        "Ends with a forward, also with one that a registered method has called.",
        "Ours, once: a flag where a count belongs.",
        "Methods are called by forwards, mostly.",
        "fsdp.lifecycle.registered-method",
    ),
    card(
        TakesANameOfTheModel,
        "takes-a-name",
        "Sets `_schedule` in the module, which may have one.",
        "Ours, once, and each wrapper that keeps its state in `module._state`.",
        "Toys have no attributes of their own.",
        "fsdp.init.names-of-the-model",
    ),
    card(
        TellsNobody,
        "tells-nobody",
        "Assigns gradients to shards and calls no hook that waits for them.",
        "Ours, once: autograd calls such hooks for leaves of the graph, which shards are not.",
        "Optimizers mostly step after the backward.",
        "fsdp.backward.post-accumulate-hooks",
    ),
    card(
        ShardsWhatIsNotCalled,
        "shards-what-is-not-called",
        "Makes a unit of every Linear, also of one whose weight others read.",
        "nn.MultiheadAttention and its out_proj.",
        "Course models have attention of their own.",
        "fsdp.forward.layers-that-are-not-called",
    ),
)
