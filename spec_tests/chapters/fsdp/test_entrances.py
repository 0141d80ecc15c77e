"""Entrances and exemptions: methods beside `forward`, and parameters that stay whole.

Encoders, heads and chunked losses are called by methods of their own. No hook of a module sees such
a call, so it must be registered; what is not registered finds shards, and must not compute with a
shard as if it were the weight. And a parameter that is left out is left out of everything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=sharded.FULLY_SHARD, level="production")

METHODS = "torch.distributed.fsdp.register_fsdp_forward_method; its test"
IGNORED = "torch.distributed.fsdp.fully_shard, ignored_params; test_fully_shard_ignore_params"


class Encoder(nn.Module):
    """Two layers and a table, with a method that a forward calls, and methods that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.layer = nn.Linear(6, 4)
        self.table = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) @ self.table

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] to [n, 4]."""
        return self.layer(self.inner(x).abs())

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] to [n, 4]."""
        return F.embedding(ids, self.table)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] to [n, 4], by way of forward, and on from there."""
        return self(x) @ self.table

    def level(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the table; x only says where."""
        return self.table.sum()


def encoder() -> Any:
    """Of small integers."""
    return sharded.of_integers(Encoder())


def batch(rank: int) -> torch.Tensor:
    """Inputs `[3, 6]` of integers."""
    return torch.arange(18.0).view(3, 6).add(rank).remainder(7) - 3


WAYS: dict[str, tuple[str, str, bool | None]] = {
    # what is called, what is registered, `reshard_after_forward`
    "method": ("encode", "encode", None),
    "method-freed": ("encode", "encode", True),
    "forward-calls-method": ("__call__", "encode", None),
    "forward-calls-method-freed": ("__call__", "encode", True),
    # freed after its forward, a module has no weights that the method could go on with
    "method-calls-forward": ("score", "score", None),
}


def through(name, model, x):
    """The output of a method."""
    return {"output": getattr(model, name)(x)}


@clause(
    "fsdp.lifecycle.registered-method",
    level="correct",
    needs=("register_fsdp_forward_method",),
    source="contract: full-weights; " + METHODS,
)
@pytest.mark.parametrize("way", WAYS)
def test_a_registered_method_is_like_forward(world, subject, way):
    """Like `forward`, a registered method MUST compute with full weights and get mean gradients.

    Also where `forward` calls it and computes on, or it calls `forward` and does: what is called is
    then no end of anything.
    """
    called, method, is_freed = WAYS[way]
    own = sharded.Own(encoder, partial(through, called), batch, units=["inner"])
    asked = (world, subject, own)
    ranks = sharded.steps_as_alone(*asked, method=method, reshard_after_forward=is_freed)
    if is_freed:
        kinds = [rank["kinds"] for rank in ranks]
        judge.equal(kinds, ["DTensor"], quantity="kinds of parameters after the call")


CALLS: dict[str, Any] = {
    "linear": lambda module, rank: module.encode(batch(rank)),
    "embedding": lambda module, rank: module.look_up(torch.tensor([0, 1])),
    "sum": lambda module, rank: module.level(batch(rank)),
}


def registered_in_vain(ctx, subject):
    """The output of a registered method of a model that was never sharded."""
    module = encoder().to(ctx.device)
    ctx.impl.register_fsdp_forward_method(module, "encode")
    return {"output": module.encode(batch(ctx.rank).to(ctx.device)).detach()}


@clause(
    "fsdp.lifecycle.registered-method-of-unsharded",
    needs=("register_fsdp_forward_method",),
    source="contract: sharded-only; " + METHODS,
    worlds=(2,),
)
def test_a_module_that_is_not_sharded_keeps_its_method(world, subject):
    """Registering a method of a module that is not sharded MUST change nothing."""
    plain = [{"output": encoder().encode(batch(rank)).detach()} for rank in range(world.size)]
    judge.tensors(world.run(registered_in_vain, subject), plain, quantity="output")


def unregistered(ctx, subject, case):
    """What a method gives that nobody has registered; None where it raises."""
    module: Any = encoder().to(ctx.device)
    sharded.shard(ctx, subject, module, ["inner"], reshard_after_forward=True)
    module(batch(ctx.rank).to(ctx.device)).sum().backward()  # as in the middle of a training
    with refusal.caught():
        found = CALLS[case](module, ctx.rank)
        return {"found": (found.full_tensor() if hasattr(found, "full_tensor") else found).detach()}
    return {"found": None}


@clause(
    "fsdp.refusals.unregistered-method",
    level="correct",
    source=f"contract: as-pytorch; {METHODS}: a DTensor does not mix with plain tensors",
)
@pytest.mark.parametrize("case", CALLS)
def test_a_method_that_is_not_registered_does_not_compute_on_a_shard(world, subject, case):
    """An unregistered method MUST raise or use full weights, never compute on a shard."""
    ranks = world.run(unregistered, subject, case)

    for rank, seen in enumerate(ranks):
        if seen["found"] is not None:
            right = {"found": CALLS[case](encoder(), rank).detach()}
            judge.tensors([seen], [right], quantity=f"what the method gives on rank {rank}")


@clause(
    "fsdp.lifecycle.registered-method-after-exception",
    level="correct",
    needs=("register_fsdp_forward_method",),
    source="contract: after-exception, full-weights; " + METHODS,
)
def test_a_step_after_a_registered_method_raised_is_right(world, subject):
    """After a caught exception in a registered method the next step MUST be right, or an error."""
    calls = "fails 3 middle, evaluate 1, zero_grad none, backward 0"
    same_as_alone(world, subject, f"stack nested freed method: {calls}", looks=("sent",))


def ignoring(ctx, subject, is_frozen=False, device=""):
    """Whether an ignored parameter is as it was, and types of it and of the others."""
    module = encoder().to(device or ctx.device)
    held = module.table.requires_grad_(not is_frozen)
    values = held.detach().clone()
    ctx.impl.fully_shard(module.inner)
    ctx.impl.fully_shard(module, ignored_params={held})
    others = sorted({type(p).__name__ for p in module.parameters() if p is not held})
    is_same = module.table is held and (held.is_meta or torch.equal(held, values))
    return is_same, type(held).__name__, others


IS_IGNORED = (True, "Parameter", ["DTensor"])


@clause("fsdp.init.ignored-parameters", source="contract: ignored; " + IGNORED)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_an_ignored_parameter_stays_what_it_is(world, subject, is_frozen):
    """An ignored parameter MUST stay the same object: plain, whole, with its values."""
    ranks = world.run(ignoring, subject, is_frozen)
    judge.equal(ranks, IS_IGNORED, quantity="(same object and values, its type, that of others)")


@clause(
    "fsdp.init.ignored-on-the-meta-device",
    source="contract: ignored; " + IGNORED + "; deferred initialisation",
)
def test_what_is_ignored_on_the_meta_device_is_that_alone(world, subject):
    """On the meta device too, an ignored parameter alone MUST stay plain, or it is refused."""
    asked, usual = (ignoring, subject, False, "meta"), (ignoring, subject)
    ranks = refusal.answer_or_refusal(world, *asked, ordinary=usual)
    if ranks is not None:
        judge.equal(ranks, IS_IGNORED, quantity="(same object, its type, that of others)")


@clause("fsdp.traffic.ignored-parameters", source="contract: ignored; " + IGNORED)
def test_an_ignored_parameter_is_neither_gathered_nor_reduced(world, subject):
    """An ignored parameter MUST NOT be sent: its gradient stays local, the others get the mean."""
    same_as_alone(world, subject, "even one-ignored: backward 0", looks=True)
