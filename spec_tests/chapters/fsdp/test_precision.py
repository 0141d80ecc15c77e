"""Precision: compute in few bits, remember in many.

Weights are gathered and computed with in a narrow dtype, gradients added up in one that the policy
names, and what an optimizer updates keeps its own. Each of the three goes wrong in silence: the
loss falls, only less. Values are chosen so that one rounding decides, which needs no tolerance.
See Micikevicius et al. 2018, and `torch.distributed.fsdp.MixedPrecisionPolicy`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.symptoms import Hint

POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy"
clause = clauses(judges=sharded.FULLY_SHARD, needs=("MixedPrecisionPolicy",), level="correct")
holds = rows(clause, same_as_alone)
of_both = clauses(judges=sharded.BOTH, level="correct")
HALF = torch.bfloat16
FINE = 2.0**-12
"""Lost next to 1 in both half precisions, and not in float32."""


def in_half(ctx, subject, module, units: Any = "children", **policy):
    """`module`, sharded, computing in bfloat16."""
    policy = {"param_dtype": HALF, **policy}
    return sharded.shard(ctx, subject, module.to(ctx.device), units, policy=policy)


def constant(value, rows=4):
    """A layer without bias whose weights are all `value`."""
    layer = nn.Linear(4, rows, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def embedding(value=1.0):
    """Four rows. As in a language model, whose layers get their inputs in one dtype."""
    layer = nn.Embedding(4, 4)
    nn.init.constant_(layer.weight, value)
    return layer


def fine():
    """Weights that bfloat16 rounds to 1, behind a table of ones."""
    return nn.Sequential(embedding(), constant(1 + FINE))


def fine_table():
    """A table whose values bfloat16 rounds to 1."""
    return nn.Sequential(embedding(1 + FINE))


def output_in_half(ctx, subject, build=fine):
    """The output of a model for one token."""
    model = in_half(ctx, subject, build())
    return {"output": model(torch.zeros(1, dtype=torch.long, device=ctx.device)).detach().double()}


def judge_rounded(ranks, value, quantity, likely):
    """Outputs must be those of weights that are 1, and not a little more."""
    __tracebackhide__ = True
    right = {"output": torch.full((1, 4), value, dtype=torch.float64)}
    hint = Hint(likely, {"output": right["output"] * (1 + FINE)})
    judge.tensors(ranks, right, quantity=quantity, hints=[hint])


@of_both(
    "fsdp.precision.computes-in-its-dtype",
    level="course",
    source="contract: MixedPrecisionPolicy/computes, fsdp/computes; "
    f"CS336 assignment 2, compute_dtype; {POLICY}, param_dtype",
)
def test_a_forward_computes_with_rounded_weights(world, subject):
    """A forward MUST compute with weights that were rounded to the dtype that was asked for."""
    ranks = world.run(output_in_half, subject)
    likely = "the output of the float32 weights: the dtype is ignored"
    judge_rounded(ranks, 4.0, "output of weights that are 1 in bfloat16", likely)


@of_both(
    "fsdp.precision.of-a-table",
    level="production",
    source="contract: MixedPrecisionPolicy/gathers, tables; a lookup multiplies nothing",
    worlds=(2,),
)
def test_a_table_is_looked_up_in_the_dtype_that_computes(world, subject):
    """An Embedding's rows MUST come in the dtype that was asked for, rounded to it."""
    ranks = world.run(output_in_half, subject, fine_table)
    judge_rounded(ranks, 1.0, "row of a table", "the row in float32: a table is left out")


def small_updates(ctx, subject):
    """Full weights after sixteen updates, each of which bfloat16 would round away."""
    model = in_half(ctx, subject, nn.Sequential(embedding()))
    optimizer = torch.optim.SGD(model.parameters(), lr=FINE)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.arange(4, device=ctx.device)).sum().backward()
        sharded.finish(ctx, subject, model)
        optimizer.step()
    full = ctx.impl.full_parameters(model)
    return {"weight": next(iter(full.values())).detach().clone()}


@of_both(
    "fsdp.precision.updates-are-not-lost",
    level="course",
    source="contract: MixedPrecisionPolicy/own-dtype, optimizer-dtype; "
    "Micikevicius et al. 2018, section 3.1; pytorch issue 106395",
)
def test_small_updates_are_not_rounded_away(world, subject):
    """Updates MUST be made to weights of the original dtype, however small they are."""
    ranks = world.run(small_updates, subject)

    right = {"weight": torch.full((4, 4), 1 - 16 * FINE)}
    likely = "nothing moved: master weights in the computing dtype"
    stuck = Hint(likely, {"weight": torch.ones(4, 4)})
    judge.tensors(ranks, right, quantity="weight after sixteen updates of 2**-12", hints=[stuck])


test_shards_keep_their_dtype = holds(
    "fsdp.precision.shards-keep-their-dtype",
    "Shards, their gradients and buffers MUST keep the original dtype.",
    {"shards": "narrow brain: backward 0", "buffers": "even counting wide: backward 0"},
    looks=("form",),
    values=False,
    source=f"contract: others-keep-dtype, own-dtype; {POLICY}; pytorch issue 146114 on buffers",
)


def fine_weights(ctx, subject, moment):
    """Full weights that bfloat16 cannot hold, once sharded or after a forward."""
    model = in_half(ctx, subject, fine())
    if moment == "after-forward":
        model(torch.zeros(1, dtype=torch.long, device=ctx.device))
    return sharded.full_parameters(ctx, model, ("1.weight",))


@of_both(
    "fsdp.precision.shards-keep-their-values",
    source="contract: MixedPrecisionPolicy/own-dtype, optimizer-dtype; "
    f"Micikevicius et al. 2018, section 3.1: a master copy; {POLICY}",
)
@pytest.mark.parametrize("moment", ["at-once", "after-forward"])
def test_shards_are_not_rounded_to_the_computing_dtype(world, subject, moment):
    """Full weights MUST keep the values that they were built with, whatever computes with them.

    Rounded once and kept in float32, they look like master weights.
    """
    ranks = world.run(fine_weights, subject, moment)

    rounded = Hint("rounded to bfloat16", {"1.weight": torch.ones(4, 4)})
    built = {"1.weight": torch.full((4, 4), 1 + FINE)}
    judge.tensors(ranks, built, quantity="weight as built", hints=[rounded], given=moment)


class Tagged(nn.Module):
    """A parameter whose gradient is whatever number the forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, tag: torch.Tensor) -> torch.Tensor:
        return (self.weight * tag).sum()


def tagged(ctx, subject, tags, cells, dtype=torch.float32, **policy):
    """The gradient after micro-batches with these numbers, the last of them reduced.

    Args:
        cells: what a rank multiplies its numbers by, in turn.
        dtype: that of the model.
    """
    model = in_half(ctx, subject, Tagged().to(dtype), **policy)
    for micro, tag in enumerate(tags):
        if tags[1:]:
            model.set_requires_gradient_sync(micro == len(tags) - 1)
        number = float(cells[ctx.rank % len(cells)] * tag)
        model(torch.tensor(number, device=ctx.device)).backward()
    gradient = next(iter(model.parameters())).grad
    return {"gradient": gradient.full_tensor().float()}


def judge_tagged(ranks, right, quantity, likely):
    """The gradient must be this number; `likely` are others, by what they come from."""
    __tracebackhide__ = True
    hints = [Hint(means, {"gradient": torch.full((6,), wrong)}) for means, wrong in likely.items()]
    judge.tensors(ranks, {"gradient": torch.full((6,), right)}, quantity=quantity, hints=hints)


@clause("fsdp.precision.reduces-in-its-dtype", source=f"contract: reduces; {POLICY}, reduce_dtype")
def test_gradients_are_added_in_the_reduction_dtype(world, subject):
    """With reduce_dtype float32, gradients MUST be added up over ranks in float32.

    The sum of 256 and 1 is 257, which bfloat16 cannot hold.
    """
    ranks = world.run(tagged, subject, (1,), (256, 1), reduce_dtype=torch.float32)

    judge_tagged(ranks, 128.5, "mean of 256 and 1", {"the sum was rounded to bfloat16": 128.0})


@clause(
    "fsdp.precision.accumulates-in-its-dtype",
    source="contract: accumulates; test_fully_shard_pending_grad; DeepSpeed issues 2352 and 2768",
)
@pytest.mark.parametrize("dtypes", [(torch.float32, HALF), (HALF, None)], ids=["policy", "model"])
def test_gradients_wait_in_the_reduction_dtype(world, subject, dtypes):
    """With reduce_dtype float32, gradients that wait for their reduction MUST add up in float32.

    256, then 1, then 1: in bfloat16 both are gone, which itself holds their sum. The forward is in
    bfloat16 because the policy says so, or because the model is.
    """
    dtype, param_dtype = dtypes
    policy = {"param_dtype": param_dtype, "reduce_dtype": torch.float32}
    ranks = world.run(tagged, subject, (256, 1, 1), (1,), dtype, **policy)

    likely = {
        "accumulated in bfloat16: both ones were lost": 256.0,
        "the last micro-batch alone": 1.0,
    }
    judge_tagged(ranks, 258.0, "sum of 256, 1 and 1", likely)


def dtypes_sent(log, kinds):
    """The dtypes of messages; raw bytes say nothing of what is in them."""
    dtypes = {dtype for event in log.collectives(*kinds) for dtype in event.dtypes}
    return sorted({dtype.replace("uint8", "bfloat16") for dtype in dtypes})


@clause(
    "fsdp.precision.sends-in-its-dtype",
    level="production",
    source="contract: gathers, reduces; " + POLICY,
)
@pytest.mark.parametrize("wide", [True, False], ids=["reduce-float32", "reduce-default"])
def test_weights_and_gradients_travel_in_their_dtypes(world, subject, wide):
    """Weights MUST travel in param_dtype, gradients in reduce_dtype or else in param_dtype."""
    word = "brain-reduced-wide" if wide else "brain"
    logs = world.run(sharded.sent_by, subject, f"narrow {word}", "backward 0")

    found = [[dtypes_sent(log, k) for k in (traffic.GATHERS, traffic.REDUCTIONS)] for log in logs]
    reduced = ["float32"] if wide else ["bfloat16"]
    judge.equal(found, [["bfloat16"], reduced], quantity="dtypes that are gathered and reduced")


LARGE = 60000.0
"""Near the largest number of float16, 65504."""


@clause(
    "fsdp.precision.float16-does-not-overflow",
    level="production",
    source="contract: mean-gradient; "
    "FSDP2 divides by about the root of the number of ranks before it adds up in float16",
)
def test_a_mean_that_float16_holds_does_not_overflow_on_the_way(world, subject):
    """In float16, gradients of 60000 on all ranks MUST give 60000: their sum is beyond it."""
    policy = {"param_dtype": None, "reduce_dtype": torch.float16}
    ranks = world.run(tagged, subject, (1,), (LARGE,), **policy)

    judge_tagged(
        ranks, LARGE, "mean gradient reduced in float16", {"the sum overflowed": torch.inf}
    )


@clause(
    "fsdp.precision.two-dtypes-reduced-in-one",
    level="production",
    judges=sharded.FULLY_SHARD,
    source="contract: grad-dtype",
    worlds=(2,),
)
def test_gradients_of_two_dtypes_are_reduced_in_one(world, subject):
    """With a reduce_dtype, a unit of two dtypes MUST get mean gradients, each in its own dtype.

    It may be refused, by the forward: a backward has nobody to tell.
    """
    own, usual = (sharded.toy_of(name, "root") for name in ("double", "even"))
    policy = {"reduce_dtype": torch.double}
    ranks = sharded.steps_as_alone(world, subject, own, usual=usual, notes_late=True, policy=policy)
    if ranks is not None:
        dtypes = {name: str(p.dtype) for name, p in own.build().named_parameters()}
        judge.equal([r["dtypes"] for r in ranks], dtypes, quantity="dtypes of gradients")


test_casts_when_recomputed = holds(
    "fsdp.precision.casts-when-recomputed",
    "A forward that a backward repeats MUST be cast as the first: checkpointing changes no bit.",
    {
        "around-the-model": "narrow brain-reduced-wide all-again: backward 0",
        "around-units": "narrow brain-reduced-wide called-again: backward 0",
    },
    level="production",
    source="contract: recomputed-casts; "
    "torch.utils.checkpoint around what calls a unit: it compares shapes and dtypes",
    worlds=(2,),
)


class UsedTwice(nn.Module):
    """A layer that is called twice in each forward, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = embedding()
        self.layer = constant(1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.embed(tokens)))


def used_once():
    """One that calls each layer once."""
    return nn.Sequential(embedding(), constant(1.0))


def tokens(rank):
    """Two tokens, the same on all ranks."""
    return torch.zeros(2, dtype=torch.long)


@of_both(
    "fsdp.precision.layer-used-twice",
    source="contract: mean-gradient, reused; a layer that is called twice has two shares in one",
)
def test_a_layer_used_twice_in_half_precision_gets_both_shares(world, subject):
    """In half precision, a layer called twice MUST get the sum of both gradients, or be refused.

    Each call may make its own cast copy, and the gradient of each must reach the shard.
    """
    own, usual = (sharded.Own(build, batch=tokens) for build in (UsedTwice, used_once))
    policy = {"param_dtype": HALF}
    sharded.steps_as_alone(world, subject, own, usual=usual, shown=("weights",), policy=policy)
