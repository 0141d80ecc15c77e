"""Surroundings: models that have names, hooks and layers of their own.

Sharding comes last to a model that others have written. It adds attributes to it, takes over what
autograd would do to a leaf, and finds layers that are never called.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded, shard
from spec_tests.laws import equivalence
from spec_tests.rig import judge

clause = clauses(judges=FULLY_SHARD, level="production")

NAMES = ("_schedule", "_unit", "_units", "_state", "_group", "_mesh", "_params", "_handles")
"""What a model may call its own, and a wrapper might."""


class Named(nn.Module):
    """A model with such names, as values or as modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in NAMES:
            setattr(self, name, nn.Identity() if kind == "modules" else f"the model's {name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def names_afterwards(ctx, subject, kind):
    """Which of the model's own names mean something else after sharding and a step."""
    model = Named(kind).to(ctx.device)
    before = {name: getattr(model, name) for name in NAMES}
    sharded = shard(ctx, subject, model, ["layer"])
    sharded(torch.ones(2, 4, device=ctx.device)).sum().backward()
    return [name for name in NAMES if getattr(model, name) is not before[name]]


@clause(
    "fsdp.init.names-of-the-model",
    source="ours, once: a noise schedule called _schedule was overwritten",
)
@pytest.mark.parametrize("kind", ["values", "modules"])
def test_attributes_of_the_model_stay_its_own(world, subject, kind):
    """Sharding MUST NOT take a name that the model uses: `_schedule`, `_state`, `_group`, ..."""
    ranks = world.run(names_afterwards, subject, kind)

    judge.equal(ranks, [], quantity="names that mean something else afterwards")


def told(ctx, subject, seed):
    """How often each parameter's hook was called by the end of a window, and what it then saw."""
    sharded = Sharded(ctx, subject, "stack", seed)
    calls: dict[str, int] = {}
    gradients: dict[str, torch.Tensor] = {}

    def hook_of(name):
        def hook(parameter):
            calls[name] = calls.get(name, 0) + 1
            gradients[name] = parameter.grad.full_tensor().clone()

        return hook

    for name, parameter in sharded.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    sharded.accumulate(0)
    early = sorted(calls)
    sharded.backward(1)
    return {"early": early, "calls": calls, "gradients": gradients}


@clause(
    "fsdp.backward.post-accumulate-hooks",
    source="torch.Tensor.register_post_accumulate_grad_hook; test_fully_shard_autograd",
)
def test_a_hook_that_waits_for_a_gradient_is_called_with_it(world, subject):
    """A post-accumulate hook MUST be called once per reduction, when `.grad` is the mean.

    An optimizer that steps in such hooks trains nothing otherwise, and nobody tells.
    """
    ranks = world.run(told, subject, 7)

    judge.equal([rank["early"] for rank in ranks], [], quantity="called before the reduction:")
    names = ranks[0]["calls"]
    for rank, seen in enumerate(ranks):
        often = {name: number for name, number in seen["calls"].items() if number != 1}
        judge.holds(
            bool(seen["calls"]) and not often,
            f"rank {rank}: expected one call for each parameter, got {often or 'none at all'}",
            likely="the sharded parameter is no leaf of the graph: who reduces must call its hooks",
        )
    gradients = [rank["gradients"] for rank in ranks]
    equivalence.mean_gradients(gradients, "stack", 7, micros=(0, 1), absent_is_zero=bool(names))


def attending(ctx):
    """A layer whose attention reads weights of a layer inside of it, and an input."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(ctx.device)
    return layer, torch.randn(2, 3, 8, device=ctx.device)


def attended(ctx, subject):
    """Output of the sharded layer, and of the plain one in the same process."""
    plain, x = attending(ctx)
    sharded = ctx.impl.fsdp(attending(ctx)[0])
    return {"got": {"output": sharded(x).detach()}, "right": {"output": plain(x).detach()}}


@clause(
    "fsdp.forward.layers-that-are-not-called",
    judges=("fsdp",),
    source="torch.nn.MultiheadAttention reads the weight of out_proj, a Linear, without calling it",
)
def test_a_layer_whose_weight_is_read_from_outside_is_whole_then(world, subject):
    """A model with an `nn.MultiheadAttention`, sharded in one call, MUST compute the same."""
    ranks = world.run(attended, subject)

    judge.tensors([r["got"] for r in ranks], [r["right"] for r in ranks], quantity="output")
