"""Forward: a sharded model computes what the plain one computes, bit for bit.

Gathering moves values and changes none, so there is no room for a tolerance. What can go wrong is
the copy out of the gather buffer (pieces of ranks interleaved with parameters), padding that gets
into a weight, and hooks that come too late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.toys import TOYS

clause = clauses(judges=sharded.BOTH, level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)

PAPER = "Zhao et al. 2023, section 3.2"

test_equals_plain = holds(
    "fsdp.forward.equals-plain",
    "A forward MUST give the bits that the plain model gives.",
    "even: record 0",
    level="course",
    source="contract: plain-bits; " + PAPER,
)

test_evaluation_leaves_no_trace = holds(
    "fsdp.forward.evaluation-leaves-no-trace",
    "A training step after an evaluation MUST have the same gradients as without it.",
    {
        "no-grad": "even: backward 4, zero_grad none, evaluate 5, backward 0",
        "inference": "even: backward 4, zero_grad none, infer 5, backward 0",
        "inference-first": "even: infer 5, backward 0",
    },
    source="contract: mean-gradient; "
    "test_fully_shard_training; torch.inference_mode: its tensors take no part in autograd",
    worlds=(2,),
)


@clause(
    "fsdp.forward.resharding-changes-no-bit",
    judges=sharded.FULLY_SHARD,
    source="contract: plain-bits; "
    "reshard_after_forward trades memory for traffic, and nothing else",
)
@pytest.mark.parametrize("setting", [False, None], ids=["False", "None"])
def test_what_is_kept_after_forward_changes_no_bit(world, subject, setting):
    """Whatever `reshard_after_forward` is, outputs and gradients MUST have the same bits."""
    runs = [
        world.run(sharded.trajectory, subject, "stack", reshard_after_forward=value)
        for value in (setting, True)
    ]

    quantity = "value with reshard_after_forward=True"
    judge.tensors(*runs, quantity=quantity, given=f"{setting}, float32, steps of AdamW")


test_resharding_to_a_part = holds(
    "fsdp.forward.resharding-to-a-part",
    "With an int, outputs and gradients MUST have the same bits, or the int be refused.",
    "stack in-part: backward 0, step, backward 1, evaluate 2",
    judges=sharded.FULLY_SHARD,
    source="contract: partial-reshard; "
    "torch.distributed.fsdp.fully_shard: reshard_after_forward as an int",
    worlds=(4,),
)


class Scales(nn.Module):
    """A factor of bfloat16 and one of float32, with bits that bfloat16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.full((4,), 1 + 2.0**-12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.coarse * self.fine


def output_of_two_dtypes(ctx, subject):
    """The output of one unit of two dtypes, in which either dtype would do."""
    model = sharded.shard(ctx, subject, Scales().to(ctx.device), "root")
    return {"output": model(torch.ones(2, 4, device=ctx.device)).detach()}


@clause(
    "fsdp.forward.two-dtypes-of-a-unit",
    judges=sharded.FULLY_SHARD,
    source="contract: mixed-dtypes; float32 norms in a bfloat16 block",
    worlds=(2,),
)
def test_each_weight_of_a_unit_computes_in_its_own_dtype(world, subject):
    """Of a unit of two dtypes each weight MUST be computed with in its own, or be refused."""
    ordinary = (hooks_that_run, subject)
    ranks = refusal.answer_or_refusal(world, output_of_two_dtypes, subject, ordinary=ordinary)

    if ranks is not None:
        plain = {"output": Scales()(torch.ones(2, 4)).detach()}
        judge.tensors(ranks, plain, quantity="output")


def hooks_that_run(ctx, subject):
    """The hooks of the original that a forward of the sharded model runs, in order."""
    rank, found = sharded.on_rank(ctx, subject, "even"), []
    rank.module.register_forward_pre_hook(lambda *_: found.append("before"))
    rank.module.register_forward_hook(lambda *_: found.append("after"))
    rank.output("0")
    return found


@clause(
    "fsdp.forward.runs-the-modules-hooks",
    source="contract: as-pytorch, runs-hooks; "
    "torch.nn.Module: call the module, not its forward, which ignores hooks",
    worlds=(2,),
)
def test_a_forward_runs_the_hooks_of_the_module(world, subject):
    """A forward of the sharded model MUST run the original module's forward hooks, each once."""
    ranks = world.run(hooks_that_run, subject)

    judge.equal(ranks, ["before", "after"], quantity="hooks of the module that ran")


def weights_that_hooks_see(ctx, subject):
    """The weight of a layer as its own hooks see it, which were there before it was sharded."""
    from torch.distributed.tensor import DTensor

    module = TOYS["mlp"].build(sharded.SEED).to(ctx.device)
    layer, seen = module.get_submodule("first"), {}

    def see(moment):
        weight: Any = layer.weight
        seen[moment] = (weight.to_local() if isinstance(weight, DTensor) else weight).clone()

    layer.register_forward_pre_hook(lambda module, args: see("before its forward"))
    layer.register_forward_hook(lambda module, args, output: see("after its forward"))
    batch = TOYS["mlp"].batch(sharded.SEED, rank=ctx.rank)
    sharded.shard(ctx, subject, module)(batch.to(ctx.device))
    return {moment: weight.detach() for moment, weight in seen.items()}


@clause(
    "fsdp.forward.hooks-see-full-weights",
    level="production",
    judges=sharded.FULLY_SHARD,
    source="contract: earlier-hooks; "
    "torch.nn.utils.spectral_norm: a forward pre-hook that computes with the weight",
    worlds=(2,),
)
def test_hooks_that_were_there_see_the_full_weights(world, subject):
    """Hooks that a module had before it was sharded MUST see its full weights."""
    ranks = world.run(weights_that_hooks_see, subject)

    weight = TOYS["mlp"].build(sharded.SEED).get_parameter("first.weight").detach()
    moments = ("before its forward", "after its forward")
    judge.tensors(ranks, dict.fromkeys(moments, weight), quantity="weight that a hook sees")


def derived(ctx, subject, calls):
    """Output and tangent of a forward under jvp after these calls, and those of the plain model."""
    rank = sharded.on_rank(ctx, subject, "stack")
    rank.follow(calls)
    inputs, found = TOYS["stack"].batch(sharded.SEED, rank=ctx.rank).to(ctx.device), []
    for model in (rank.wrapped, TOYS["stack"].build(sharded.SEED).to(ctx.device)):
        pair: Any = torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))
        found.append({"output": pair[0].detach(), "tangent": pair[1].detach()})
    return found


@clause(
    "fsdp.forward.under-a-transform",
    judges=sharded.FULLY_SHARD,
    source="contract: jvp; torch.func.jvp; FSDP2 gathers outside of transforms",
    worlds=(2,),
)
@pytest.mark.parametrize("calls", ["", "backward 0"], ids=["first", "later"])
def test_a_forward_derivative_is_that_of_the_plain_model(world, subject, calls):
    """Under `torch.func.jvp` a forward MUST give the plain value and tangent, or an error."""
    ordinary = (hooks_that_run, subject)
    ranks = refusal.answer_or_refusal(world, derived, subject, calls, ordinary=ordinary)

    if ranks is not None:
        found, plain = zip(*ranks, strict=True)
        judge.tensors(found, plain, quantity="value")
