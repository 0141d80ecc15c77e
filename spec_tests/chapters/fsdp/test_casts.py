"""Casts: what each unit casts on its way in and out, and what it leaves alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD
from spec_tests.chapters.fsdp.test_precision import HALF, POLICY, in_half, output_in_half
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=FULLY_SHARD, needs=("MixedPrecisionPolicy",), level="correct")


class Spy(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> Any:
        seen = {"weight": self.weight, "x": x, **extra}
        self.seen = {name: value.dtype for name, value in seen.items()}
        return {"y": x * self.weight, "ids": extra["ids"]}


class Answer(NamedTuple):
    """What a nest gives."""

    y: torch.Tensor
    ids: torch.Tensor


class Nest(nn.Module):
    """A spy in a spy, whose output has names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Spy()
        self.outer = Spy()

    def forward(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> Any:
        return Answer(**self.inner(self.outer(x, extra=extra)["y"], extra=extra))


def seen_dtypes(ctx, subject, options, is_training):
    """What two units see whose policies differ, and what comes out."""
    policy = ctx.impl.MixedPrecisionPolicy
    module = Nest().to(ctx.device)
    ctx.impl.fully_shard(module.inner, mp_policy=policy(param_dtype=torch.float32))
    ctx.impl.fully_shard(module, mp_policy=policy(param_dtype=HALF, **options))
    extra = {
        "ids": torch.arange(4, device=ctx.device),
        "mask": torch.ones(4, dtype=torch.bool, device=ctx.device),
        "angles": torch.ones(4, device=ctx.device),
    }
    with torch.set_grad_enabled(is_training):
        output = module(torch.ones(2, 4, device=ctx.device), extra=extra)
    dtypes = {name: value.dtype for name, value in zip(Answer._fields, output, strict=True)}
    return {
        "outer": module.outer.seen,
        "inner": module.inner.seen,
        type(output).__name__: dtypes,
    }


def seen_by(weight: torch.dtype, inputs: torch.dtype) -> dict[str, torch.dtype]:
    """What a unit should see whose weight and floating-point inputs have these dtypes."""
    others = {"ids": torch.int64, "mask": torch.bool}
    return {"weight": weight, "x": inputs, "angles": inputs, **others}


POLICIES: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    # options, and the dtypes of the outer unit's inputs and output
    "default": ({}, HALF, torch.float32),
    "inputs-as-they-are": ({"cast_forward_inputs": False}, torch.float32, torch.float32),
    "output-dtype": ({"output_dtype": torch.float64}, HALF, torch.float64),
    "evaluated": ({"output_dtype": torch.float64}, HALF, torch.float64),
}


@clause(
    "fsdp.precision.casts-are-selective", source=f"contract: casts; {POLICY}; torchtitan issue 2881"
)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_unit_casts_what_its_own_policy_names(world, subject, policy):
    """Each unit MUST follow its own precision policy and cast floating-point tensors only."""
    options, inputs, output = POLICIES[policy]
    ranks = world.run(seen_dtypes, subject, options, policy != "evaluated")

    wanted = {
        "outer": seen_by(HALF, inputs),
        "inner": seen_by(torch.float32, torch.float32),
        "Answer": {"y": output, "ids": torch.int64},
    }
    judge.equal(ranks, wanted, quantity="dtypes in the units and of the output", given=policy)


class Scorer(Spy):
    """A spy with an entrance of another name."""

    def score(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> Any:
        """What `forward` gives."""
        return Spy.forward(self, x, extra=extra)


def seen_in_a_method(ctx, subject):
    """Dtypes that a registered method sees under a policy of bfloat16."""
    module = Scorer().to(ctx.device)
    policy = ctx.impl.MixedPrecisionPolicy(param_dtype=HALF, output_dtype=torch.float64)
    ctx.impl.fully_shard(module, mp_policy=policy)
    ctx.impl.register_fsdp_forward_method(module, "score")
    extra = {"ids": torch.arange(4, device=ctx.device)}
    output = module.score(torch.ones(2, 4, device=ctx.device), extra=extra)
    return module.seen | {"output": output["y"].dtype}


@clause(
    "fsdp.precision.registered-method",
    needs=("MixedPrecisionPolicy", "register_fsdp_forward_method"),
    source="contract: casts, full-weights; "
    "torch.distributed.fsdp.register_fsdp_forward_method; its test",
)
def test_a_registered_method_gets_the_casts_of_its_unit(world, subject):
    """A registered method's inputs and outputs MUST be cast as those of `forward` are."""
    wanted = {"weight": HALF, "x": HALF, "ids": torch.int64, "output": torch.float64}
    judge.equal(world.run(seen_in_a_method, subject), wanted, quantity="dtypes in the method")


class Quantised(nn.Module):
    """Frozen codes at the end of their dtype's range, which no float holds, and a scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.iinfo(dtype).max - torch.arange(5).to(dtype), False)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.codes.detach().clone()
        return self.scale * (self.codes % 7) * x


def quantised(ctx, subject, dtype):
    """The codes as a forward sees them, and the gradient of the scale."""
    model = in_half(ctx, subject, Quantised(dtype), "root")
    model(torch.ones(5, device=ctx.device)).sum().backward()
    return {"codes": model.seen, "gradient of scale": model.scale.grad.full_tensor()}


@clause(
    "fsdp.precision.integers-are-not-cast",
    source=f"contract: integers; {POLICY}; Dettmers et al. 2023, QLoRA: frozen weights of few bits",
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_frozen_integers_keep_their_values_beside_what_is_cast(world, subject, dtype):
    """Frozen integers MUST be gathered as they are beside trained parameters, or be refused."""
    ordinary = (output_in_half, subject)
    ranks = refusal.answer_or_refusal(world, quantised, subject, dtype, ordinary=ordinary)

    if ranks is not None:
        codes = Quantised(dtype).codes.detach()
        right = {"codes": codes, "gradient of scale": (codes % 7).float()}
        judge.tensors(ranks, right, quantity="value")
