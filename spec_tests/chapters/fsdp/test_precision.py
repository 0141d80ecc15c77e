"""Precision: compute in few bits, remember in many.

Weights are gathered and computed with in a narrow dtype, gradients added up in one that the policy
names, and what an optimizer updates keeps its own. Each of the three goes wrong in silence: the
loss falls, only less. Values are chosen so that one rounding decides, which needs no tolerance.
See Micikevicius et al. 2018, and `torch.distributed.fsdp.MixedPrecisionPolicy`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    finish,
    full_parameters,
    judge_gradients,
    on_rank,
    shard,
)
from spec_tests.programs.laws import refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint

POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy"
clause = clauses(judges=FULLY_SHARD, needs=("MixedPrecisionPolicy",), level="correct")
of_both = clauses(judges=BOTH, level="correct")
HALF = torch.bfloat16
FINE = 2.0**-12
"""Lost next to 1 in both half precisions, and not in float32."""


def in_half(ctx, subject, module, units: Any = "children", **policy):
    """`module`, sharded, computing in bfloat16."""
    module = module.to(ctx.device)
    if subject == "fsdp":
        return ctx.impl.fsdp(module, compute_dtype=HALF)
    policy = {"param_dtype": HALF, **policy}
    return shard(ctx, subject, module, units, mp_policy=ctx.impl.MixedPrecisionPolicy(**policy))


def constant(value, rows=4):
    """A layer without bias whose weights are all `value`."""
    layer = nn.Linear(4, rows, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def embedding():
    """Four rows of ones. As in a language model, whose layers get their inputs in one dtype."""
    layer = nn.Embedding(4, 4)
    nn.init.ones_(layer.weight)
    return layer


def output_of_fine_weights(ctx, subject):
    """The output of weights that bfloat16 rounds to 1."""
    model = in_half(ctx, subject, nn.Sequential(embedding(), constant(1 + FINE)))
    return {"output": model(torch.zeros(1, dtype=torch.long, device=ctx.device)).detach().double()}


@of_both(
    "fsdp.precision.computes-in-its-dtype",
    level="course",
    source="contract: MixedPrecisionPolicy/computes, fsdp/computes; "
    f"CS336 assignment 2, compute_dtype; {POLICY}, param_dtype",
)
def test_a_forward_computes_with_rounded_weights(world, subject):
    """A forward MUST compute with weights that were rounded to the dtype that was asked for."""
    ranks = world.run(output_of_fine_weights, subject)

    fine = {"output": torch.full((1, 4), 4 * (1 + FINE), dtype=torch.float64)}
    judge.tensors(
        ranks,
        {"output": torch.full((1, 4), 4.0, dtype=torch.float64)},
        quantity="output of weights that are 1 in bfloat16",
        hints=[Hint("the output of the float32 weights: the dtype is ignored", fine)],
    )


def looked_up(ctx, subject):
    """A row of a table whose values bfloat16 rounds to 1."""
    table = embedding()
    nn.init.constant_(table.weight, 1 + FINE)
    model = in_half(ctx, subject, nn.Sequential(table))
    return {"row": model(torch.zeros(1, dtype=torch.long, device=ctx.device)).detach().double()}


@of_both(
    "fsdp.precision.of-a-table",
    level="production",
    source="contract: MixedPrecisionPolicy/gathers, tables; a lookup multiplies nothing",
    worlds=(2,),
)
def test_a_table_is_looked_up_in_the_dtype_that_computes(world, subject):
    """An Embedding's rows MUST come in the dtype that was asked for, rounded to it."""
    ones = {"row": torch.ones(1, 4, dtype=torch.float64)}
    fine = Hint("the row in float32: a table is left out", {"row": ones["row"] * (1 + FINE)})
    judge.tensors(world.run(looked_up, subject), ones, quantity="row of a table", hints=[fine])


def small_updates(ctx, subject):
    """Full weights after sixteen updates, each of which bfloat16 would round away."""
    model = in_half(ctx, subject, nn.Sequential(embedding()))
    optimizer = torch.optim.SGD(model.parameters(), lr=FINE)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.arange(4, device=ctx.device)).sum().backward()
        finish(ctx, subject, model)
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

    judge.tensors(
        ranks,
        {"weight": torch.full((4, 4), 1 - 16 * FINE)},
        quantity="weight after sixteen updates of 2**-12",
        hints=[
            Hint(
                "nothing moved: master weights in the computing dtype", {"weight": torch.ones(4, 4)}
            )
        ],
    )


class Average(nn.Module):
    """A factor, and a buffer that follows the inputs."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(x.detach().mean(dim=0).to(self.average.dtype), 0.1)
        return x * self.factor


def kept_dtypes(ctx, subject):
    """Dtypes of parameters, gradients, optimizer state and buffers around a step."""
    module = nn.Sequential(constant(1.0), Average())
    model = in_half(ctx, subject, module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.rand(3, 4, device=ctx.device)).sum().backward()
    named: dict[str, Any] = dict(module.named_parameters())
    found = {f"gradient of {n}": p.grad.dtype for n, p in named.items()}
    optimizer.step()
    found |= {n: p.dtype for n, p in module.named_parameters()}
    found |= {f"buffer {n}": b.dtype for n, b in module.named_buffers() if b.is_floating_point()}
    for number, state in enumerate(optimizer.state.values()):
        found[f"moment of parameter {number}"] = state["exp_avg"].dtype
    return {name: str(dtype) for name, dtype in found.items()}


@clause(
    "fsdp.precision.shards-keep-their-dtype",
    source=f"contract: others-keep-dtype, own-dtype; {POLICY}; pytorch issue 146114 on buffers",
)
def test_what_an_optimizer_sees_keeps_its_dtype(world, subject):
    """Shards, their gradients, optimizer state and buffers MUST keep the original dtype."""
    ranks = world.run(kept_dtypes, subject)

    for rank, found in enumerate(ranks):
        wrong = {name: dtype for name, dtype in found.items() if dtype != "torch.float32"}
        judge.holds(not wrong, f"rank {rank}: expected torch.float32, got {wrong}")


def fine_weights(ctx, subject, moment):
    """Full weights that bfloat16 cannot hold, once sharded or after a forward."""
    model = in_half(ctx, subject, nn.Sequential(embedding(), constant(1 + FINE)))
    if moment == "after-forward":
        model(torch.zeros(1, dtype=torch.long, device=ctx.device))
    return full_parameters(ctx, model, ("1.weight",))


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


def tagged(ctx, subject, tags, reduce_dtype, cells, param_dtype=HALF):
    """The gradient after micro-batches with these numbers, the last of them reduced.

    Without a `param_dtype` the model itself is in bfloat16.
    """
    module = Tagged() if param_dtype else Tagged().to(HALF)
    model = in_half(ctx, subject, module, reduce_dtype=reduce_dtype, param_dtype=param_dtype)
    for micro, tag in enumerate(tags):
        if tags[1:]:
            model.set_requires_gradient_sync(micro == len(tags) - 1)
        model(torch.tensor(float(cells[ctx.rank] * tag), device=ctx.device)).backward()
    gradient = next(iter(model.parameters())).grad
    return {"gradient": gradient.full_tensor().float()}


@clause("fsdp.precision.reduces-in-its-dtype", source=f"contract: reduces; {POLICY}, reduce_dtype")
def test_gradients_are_added_in_the_reduction_dtype(world, subject):
    """With reduce_dtype float32, gradients MUST be added up over ranks in float32.

    The sum of 256 and 1 is 257, which bfloat16 cannot hold.
    """
    ranks = world.run(tagged, subject, (1,), torch.float32, (256, 1))

    judge.tensors(
        ranks,
        {"gradient": torch.full((6,), 128.5)},
        quantity="mean of 256 and 1",
        hints=[Hint("the sum was rounded to bfloat16", {"gradient": torch.full((6,), 128.0)})],
    )


@clause(
    "fsdp.precision.accumulates-in-its-dtype",
    source="contract: accumulates; test_fully_shard_pending_grad; DeepSpeed issues 2352 and 2768",
)
@pytest.mark.parametrize("param_dtype", [HALF, None], ids=["policy", "model"])
def test_gradients_wait_in_the_reduction_dtype(world, subject, param_dtype):
    """With reduce_dtype float32, gradients that wait for their reduction MUST add up in float32.

    256, then 1, then 1: in bfloat16 both are gone, which itself holds their sum. The forward is in
    bfloat16 because the policy says so, or because the model is.
    """
    ranks = world.run(tagged, subject, (256, 1, 1), torch.float32, (1, 1), param_dtype)

    lost = Hint("accumulated in bfloat16: both ones were lost", {"gradient": torch.full((6,), 256)})
    alone = Hint("the last micro-batch alone", {"gradient": torch.full((6,), 1.0)})
    right = {"gradient": torch.full((6,), 258.0)}
    judge.tensors(ranks, right, quantity="sum of 256, 1 and 1", hints=[lost, alone])


def sent_dtypes(ctx, subject, reduce_dtype):
    """Dtypes of what is gathered and of what is reduced in a step."""
    model = in_half(ctx, subject, nn.Sequential(constant(1.0)), reduce_dtype=reduce_dtype)
    with ctx.recording() as recorder:
        model(torch.ones(1, 4, device=ctx.device)).sum().backward()
    kinds = {"gathered": traffic.GATHERS, "reduced": traffic.REDUCTIONS}
    sent = {word: recorder.log().collectives(*which) for word, which in kinds.items()}
    return {  # raw bytes say nothing of what is in them
        word: sorted({d.replace("uint8", "bfloat16") for e in events for d in e.dtypes})
        for word, events in sent.items()
    }


@clause(
    "fsdp.precision.sends-in-its-dtype",
    level="production",
    source="contract: gathers, reduces; " + POLICY,
)
@pytest.mark.parametrize("wide", [True, False], ids=["reduce-float32", "reduce-default"])
def test_weights_and_gradients_travel_in_their_dtypes(world, subject, wide):
    """Weights MUST travel in param_dtype, gradients in reduce_dtype or else in param_dtype."""
    ranks = world.run(sent_dtypes, subject, torch.float32 if wide else None)

    reduced = ["float32"] if wide else ["bfloat16"]
    judge.equal(
        ranks, {"gathered": ["bfloat16"], "reduced": reduced}, quantity="dtypes of what is sent"
    )


LARGE = 60000.0
"""Near the largest number of float16, 65504."""


def mean_of_large_gradients(ctx, subject):
    """A mean gradient that float16 holds, out of a sum that it does not."""
    policy = ctx.impl.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = shard(ctx, subject, constant(0.0).to(ctx.device), (), mp_policy=policy)
    (LARGE * model(torch.ones(1, 4, device=ctx.device))).sum().backward()
    gradient: Any = next(iter(model.parameters())).grad
    return {"gradient": gradient.full_tensor().clone()}


@clause(
    "fsdp.precision.float16-does-not-overflow",
    level="production",
    source="contract: mean-gradient; "
    "FSDP2 divides by about the root of the number of ranks before it adds up in float16",
)
def test_a_mean_that_float16_holds_does_not_overflow_on_the_way(world, subject):
    """In float16, gradients of 60000 on all ranks MUST give 60000: their sum is beyond it."""
    ranks = world.run(mean_of_large_gradients, subject)

    judge.tensors(
        ranks,
        {"gradient": torch.full((4, 4), LARGE)},
        quantity="mean gradient reduced in float16",
        hints=[Hint("the sum overflowed", {"gradient": torch.full((4, 4), torch.inf)})],
    )


def of_two_dtypes(ctx, subject, toy):
    """Gradients of a unit of two dtypes that are reduced in one."""
    rank = on_rank(ctx, subject, f"{toy} root wide-reduced")
    loss = rank.loss("0")
    with refusal.caught() as late:  # a refusal comes before
        loss.backward()
    if late["error"]:
        return late["error"], {}, {}
    dtypes = {name: str(p.grad.dtype) for name, p in rank.named() if p.grad is not None}
    return "", dtypes, rank.gradients()


@clause(
    "fsdp.precision.two-dtypes-reduced-in-one",
    level="production",
    judges=FULLY_SHARD,
    source="contract: grad-dtype",
    worlds=(2,),
)
def test_gradients_of_two_dtypes_are_reduced_in_one(world, subject):
    """With a reduce_dtype, a unit of two dtypes MUST get mean gradients, each in its own dtype.

    It may be refused, by the forward: a backward has nobody to tell.
    """
    usual = (of_two_dtypes, subject, "even")
    ranks = refusal.answer_or_refusal(world, of_two_dtypes, subject, "two-dtypes", ordinary=usual)
    if ranks is None:
        return
    late, dtypes, gradients = zip(*ranks, strict=True)
    judge.equal(late, "", quantity="error of the backward")
    wanted = {name: str(p.dtype) for name, p in oracle.parameters("double", SEED).items()}
    judge.equal(dtypes, wanted, quantity="dtypes of gradients")
    judge_gradients(gradients, subject, "two-dtypes root: backward 0")


def with_and_without_recomputation(ctx, subject):
    """Output and gradient of the input, of a unit whose output_dtype is wider."""
    policy = ctx.impl.MixedPrecisionPolicy(param_dtype=HALF, output_dtype=torch.float32)
    layer: Any = shard(ctx, subject, constant(1.0).to(ctx.device), (), mp_policy=policy)
    found = []
    for call in (lambda f, x: f(x), partial(checkpoint, use_reentrant=False)):
        x = torch.ones(1, 4, device=ctx.device, requires_grad=True)
        output = call(lambda x: (layer(x) + FINE).square(), x)
        output.sum().backward()
        found.append({"output": output.detach(), "gradient": x.grad})
    return found


@clause(
    "fsdp.precision.casts-when-recomputed",
    level="production",
    source="contract: recomputed-casts; "
    "torch.utils.checkpoint around what calls a unit: it compares shapes and dtypes",
    worlds=(2,),
)
def test_what_is_recomputed_has_the_same_dtypes(world, subject):
    """A forward that a backward repeats MUST be cast as the first: checkpointing changes no bit."""
    for usual, recomputed in world.run(with_and_without_recomputation, subject):
        judge.tensors([recomputed], usual, quantity="value with activation checkpointing")


class UsedTwice(nn.Module):
    """A layer that is called twice in each forward, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = embedding()
        self.layer = constant(1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.embed(tokens)))


def reused_in_half(ctx, subject):
    """Weights after a step of SGD with rate one, on two tokens."""
    model = in_half(ctx, subject, UsedTwice(), units=("embed", "layer"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.zeros(2, dtype=torch.long, device=ctx.device)
    model(tokens).sum().backward()
    finish(ctx, subject, model)
    optimizer.step()
    return full_parameters(ctx, model, ("embed.weight", "layer.weight"))


@of_both(
    "fsdp.precision.layer-used-twice",
    source="contract: mean-gradient, reused; a layer that is called twice has two shares in one",
)
def test_a_layer_used_twice_in_half_precision_gets_both_shares(world, subject):
    """In half precision, a layer called twice MUST get the sum of both gradients, or be refused.

    Each call may make its own cast copy, and the gradient of each must reach the shard.
    """
    ranks = refusal.answer_or_refusal(
        world, reused_in_half, subject, ordinary=(output_of_fine_weights, subject)
    )
    if ranks is None:
        return
    tokens = 2.0
    embed = torch.ones(4, 4)
    embed[0] -= 16 * tokens  # W^T W^T 1 for each token, W of 4 x 4 ones
    one_use = 4 * tokens
    right = {"embed.weight": embed, "layer.weight": torch.full((4, 4), 1 - 2 * one_use)}
    lost = Hint(
        "one of the two uses is lost",
        {"embed.weight": embed, "layer.weight": torch.full((4, 4), 1 - one_use)},
    )
    judge.tensors(
        [{name: value.float() for name, value in rank.items()} for rank in ranks],
        right,
        quantity="weight after one step",
        hints=[lost],
    )
