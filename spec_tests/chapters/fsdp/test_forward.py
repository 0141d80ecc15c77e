"""Forward: a sharded model computes what the plain one computes, bit for bit.

Gathering moves values and changes none, so there is no room for a tolerance. What can go wrong is
the copy out of the gather buffer (pieces of ranks interleaved with parameters), padding that gets
into a weight, and hooks that see only tensors where a model is handed a dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    finish,
    of_integers,
    on_rank,
    shard,
    sharded_toy,
)
from spec_tests.programs.calls import parsed
from spec_tests.programs.law import same_as_alone, situations
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.toys import TOYS

clause = clauses(judges=BOTH, level="correct", worlds=(2, 3))

PAPER = "Zhao et al. 2023, section 3.2"


@clause("fsdp.forward.equals-plain", level="course", source="contract: plain-bits; " + PAPER)
def test_the_output_is_that_of_the_plain_model(world, subject):
    """A forward MUST give the bits that the plain model gives."""
    same_as_alone(world, subject, "even: record 0")


@clause(
    "fsdp.forward.equals-any-plain-model",
    source="contract: plain-bits, any-rows, tied, mixed-dtypes, reused; " + PAPER,
)
@situations(
    {
        toy: f"{toy}: record 0, record 1"
        for toy in ("ragged", "stack", "tied", "reused", "not-the-middle", "two-dtypes")
    }
)
def test_the_output_is_that_of_any_plain_model(world, subject, situation):
    """Odd sizes, ties, reuse, mixed dtypes: a forward MUST give the plain bits, or be refused."""
    same_as_alone(world, subject, situation)


@clause("fsdp.forward.without-gradients", source="contract: plain-bits; evaluation between steps")
@situations({toy: f"{toy}: evaluate 0, evaluate 1" for toy in ("even", "stack")})
def test_a_forward_without_gradients_gives_the_same_output(world, subject, situation):
    """Under `no_grad`, a forward MUST give the bits that the plain model gives."""
    same_as_alone(world, subject, situation)


@clause(
    "fsdp.forward.evaluation-leaves-no-trace",
    source="contract: mean-gradient; "
    "test_fully_shard_training; torch.inference_mode: its tensors take no part in autograd",
    worlds=(2,),
)
@situations(
    {
        "no-grad": "even: backward 4, zero_grad none, evaluate 5, backward 0",
        "inference": "even: backward 4, zero_grad none, infer 5, backward 0",
        "inference-first": "even: infer 5, backward 0",
    }
)
def test_an_evaluation_changes_nothing_about_the_next_step(world, subject, situation):
    """A training step after an evaluation MUST have the same gradients as without it."""
    same_as_alone(world, subject, situation)


@dataclass
class Found:
    """An output with names, as many models give it."""

    y: torch.Tensor
    z: torch.Tensor


@dataclass
class Nested:
    """The same in fields that are containers."""

    first: list[torch.Tensor]
    second: dict[str, torch.Tensor]

    @classmethod
    def of(cls, y: torch.Tensor, z: torch.Tensor) -> Nested:
        """Both outputs in one."""
        return cls([y], {"z": z})

    @property
    def y(self) -> torch.Tensor:
        """The first output."""
        return self.first[0]

    @property
    def z(self) -> torch.Tensor:
        """The second output."""
        return self.second["z"]


class Both(NamedTuple):
    """The same as a tuple with names."""

    y: torch.Tensor
    z: torch.Tensor


class Structured(nn.Module):
    """Takes nested containers by keyword, and gives them, a named tuple or a dataclass."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = Inner(kind)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch: Any = {"x": inputs["x"], "tags": ["a", 1]}
        if self.inner.kind is Both:
            batch = Both(y=inputs["x"], z=torch.ones(1))
        found = self.inner(batch=batch, scale=2)
        y, z = found.values() if isinstance(found, dict) else (found.y, found.z)
        return {"parts": (y, [z]), "note": "kept"}


class Inner(nn.Module):
    """Two layers whose inputs and outputs sit in containers."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.other = nn.Linear(6, 12)
        self.kind = kind

    def forward(self, *, batch: Any, scale: int) -> Any:
        x = batch["x"] if isinstance(batch, dict) else batch.y
        return self.kind(y=self.linear(x) * scale, z=self.other(x).abs())


OUTPUTS: dict[str, Any] = {
    "containers": dict,
    "second-alone": dict,
    "named-tuple": Both,
    "dataclass": Found,
    "dataclass-of-containers": Nested.of,
}


def loss_of(found, outputs):
    """Of both outputs, or of the second alone."""
    first, (second,) = found["parts"]
    used = [second] if outputs == "second-alone" else [first, second]
    return sum(output.square().sum() for output in used)


def structured(ctx, subject, seed, outputs):
    """Gradients of weights and input through nested containers."""
    module = of_integers(Structured(OUTPUTS[outputs])).to(ctx.device)
    model = shard(ctx, subject, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = TOYS["mlp"].batch(seed, rank=ctx.rank).to(ctx.device).requires_grad_()
    found = model(inputs={"x": x})
    try:
        (ctx.world_size * loss_of(found, outputs)).backward()
    except Exception as error:
        if not outputs.startswith("dataclass"):
            raise
        return {"late": f"{type(error).__name__}: {error}"}  # a refusal comes before
    finish(ctx, subject, model)
    optimizer.step()
    full = ctx.impl.full_parameters(model)
    after = {name.removeprefix("module."): value.detach() for name, value in full.items()}
    return {"note": found["note"], "after": after, "input": x.grad}


@clause(
    "fsdp.forward.nested-containers",
    source="contract: containers, same-containers; "
    "test_fully_shard_training: inputs and outputs in containers, keyword arguments",
)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_inputs_and_outputs_may_sit_in_containers(world, subject, outputs):
    """Inputs by keyword and outputs in nested containers MUST get right gradients.

    A hook on tensors alone, or on the first of them, never sees that such a module's backward
    begins. A dataclass may be refused, by the forward.
    """
    usual = (structured, subject, 7, "containers")
    if outputs.startswith("dataclass"):
        ranks = refusal.answer_or_refusal(world, structured, subject, 7, outputs, ordinary=usual)
    else:
        ranks = world.run(structured, subject, 7, outputs)
    if ranks is None:
        return
    late = next((rank["late"] for rank in ranks if "late" in rank), "")
    judge.holds(
        not late,
        f"expected right gradients, or an error of the forward, got one of the backward: {late}",
        likely="tensors in a dataclass are not seen: its backward finds weights that were freed",
    )
    judge.equal([rank["note"] for rank in ranks], "kept", quantity="value that is no tensor")
    plain = of_integers(Structured(OUTPUTS[outputs]))
    batches = [TOYS["mlp"].batch(7, rank=rank).requires_grad_() for rank in range(world.size)]
    for x in batches:
        loss_of(plain({"x": x}), outputs).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    after = {n: p.detach() for n, p in plain.named_parameters()}
    judge.tensors([rank["after"] for rank in ranks], after, quantity="weight after one step")
    judge.tensors(
        [{"x": rank["input"]} for rank in ranks],
        [{"x": x.grad * world.size} for x in batches],
        quantity="gradient of the input",
    )


def under_setting(ctx, subject, reshard_after_forward):
    """Outputs and gradients of three steps in one setting, float32 and real-valued data."""
    model = sharded_toy(ctx, subject, "stack", reshard_after_forward=reshard_after_forward)
    # Weights move by ten times what rounding may move them, or more.
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-16, foreach=False)
    generator = torch.Generator().manual_seed(SEED + ctx.rank)
    found = {}
    for step in range(3):
        batch = (torch.randn(4, 6, generator=generator).to(ctx.device) * 2).clamp(-4, 4)
        output = model(batch)
        output.square().sum().backward()
        for name, p in model.named_parameters():
            found[f"{name}, step {step}"] = p.grad.to_local().clone()
        found[f"output, step {step}"] = output.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found


def judge_setting(world, subject, setting, *, may_refuse=False):
    """Equal bits in this setting and where full weights are freed after forward."""
    __tracebackhide__ = True
    ordinary = (under_setting, subject, True)
    if may_refuse:
        case = (under_setting, subject, setting)
        ranks = refusal.answer_or_refusal(world, *case, ordinary=ordinary)
    else:
        ranks = world.run(under_setting, subject, setting)
    if ranks is None:
        return
    freed = world.run(*ordinary)

    judge.tensors(
        ranks,
        freed,
        quantity="value with reshard_after_forward=True",
        given=f"reshard_after_forward={setting}, float32, three steps",
    )


@clause(
    "fsdp.forward.resharding-changes-no-bit",
    judges=FULLY_SHARD,
    source="contract: plain-bits; "
    "reshard_after_forward trades memory for traffic, and nothing else",
)
@pytest.mark.parametrize("setting", [False, None], ids=["False", "None"])
def test_what_is_kept_after_forward_changes_no_bit(world, subject, setting):
    """Whatever `reshard_after_forward` is, outputs and gradients MUST have the same bits."""
    judge_setting(world, subject, setting)


@clause(
    "fsdp.forward.resharding-to-a-part",
    judges=FULLY_SHARD,
    source="contract: partial-reshard; "
    "torch.distributed.fsdp.fully_shard: reshard_after_forward as an int",
    worlds=(4,),
)
def test_resharding_to_a_smaller_world_changes_no_bit(world, subject):
    """With an int, outputs and gradients MUST have the same bits, or the int be refused."""
    judge_setting(world, subject, 2, may_refuse=True)


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
    model = shard(ctx, subject, Scales().to(ctx.device), "root")
    return {"output": model(torch.ones(2, 4, device=ctx.device)).detach()}


@clause(
    "fsdp.forward.two-dtypes-of-a-unit",
    judges=FULLY_SHARD,
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
    rank, found = on_rank(ctx, subject, "even"), []
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

    module = TOYS["mlp"].build(SEED).to(ctx.device)
    layer, seen = module.get_submodule("first"), {}

    def see(moment):
        weight: Any = layer.weight
        seen[moment] = (weight.to_local() if isinstance(weight, DTensor) else weight).clone()

    layer.register_forward_pre_hook(lambda module, args: see("before its forward"))
    layer.register_forward_hook(lambda module, args, output: see("after its forward"))
    shard(ctx, subject, module)(TOYS["mlp"].batch(SEED, rank=ctx.rank).to(ctx.device))
    return {moment: weight.detach() for moment, weight in seen.items()}


@clause(
    "fsdp.forward.hooks-see-full-weights",
    level="production",
    judges=FULLY_SHARD,
    source="contract: earlier-hooks; "
    "torch.nn.utils.spectral_norm: a forward pre-hook that computes with the weight",
    worlds=(2,),
)
def test_hooks_that_were_there_see_the_full_weights(world, subject):
    """Hooks that a module had before it was sharded MUST see its full weights."""
    ranks = world.run(weights_that_hooks_see, subject)

    weight = TOYS["mlp"].build(SEED).get_parameter("first.weight").detach()
    moments = ("before its forward", "after its forward")
    judge.tensors(ranks, dict.fromkeys(moments, weight), quantity="weight that a hook sees")


def derived(ctx, subject, calls):
    """Output and tangent of a forward under jvp after these calls, and those of the plain model."""
    rank = on_rank(ctx, subject, "stack")
    rank.follow(parsed(calls))
    inputs, found = TOYS["stack"].batch(SEED, rank=ctx.rank).to(ctx.device), []
    for model in (rank.wrapped, TOYS["stack"].build(SEED).to(ctx.device)):
        pair: Any = torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))
        found.append({"output": pair[0].detach(), "tangent": pair[1].detach()})
    return found


@clause(
    "fsdp.forward.under-a-transform",
    judges=FULLY_SHARD,
    source="contract: jvp; torch.func.jvp; FSDP2 gathers outside of transforms",
    worlds=(2,),
)
@pytest.mark.parametrize("calls", ["", "backward 0"], ids=["first", "later"])
def test_a_forward_derivative_is_that_of_the_plain_model(world, subject, calls):
    """Under `torch.func.jvp` a forward MUST give the plain value and tangent, or an error."""
    ordinary = (under_setting, subject, True)
    ranks = refusal.answer_or_refusal(world, derived, subject, calls, ordinary=ordinary)

    if ranks is not None:
        found, plain = zip(*ranks, strict=True)
        judge.tensors(found, plain, quantity="value")
