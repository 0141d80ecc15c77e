"""Casts: what each unit casts on its way in and out, and what it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD
from spec_tests.chapters.fsdp.test_precision import HALF, POLICY, in_half, output_of_fine_weights
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=FULLY_SHARD, needs=("MixedPrecisionPolicy",), level="correct")


class Spy(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> Any:
        self.seen = {"weight": str(self.weight.dtype), "x": str(x.dtype)}
        self.seen |= {name: str(value.dtype) for name, value in extra.items()}
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
    found = {f"outer {k}": v for k, v in module.outer.seen.items()}
    found |= {f"inner {k}": v for k, v in module.inner.seen.items()}
    found["output"] = type(output).__name__
    return found | {
        f"output {k}": str(v.dtype) for k, v in zip(Answer._fields, output, strict=True)
    }


_SEEN = {
    "outer weight": "torch.bfloat16",
    "outer x": "torch.bfloat16",
    "outer ids": "torch.int64",
    "outer mask": "torch.bool",
    "outer angles": "torch.bfloat16",
    "inner weight": "torch.float32",
    "inner x": "torch.float32",
    "inner ids": "torch.int64",
    "inner mask": "torch.bool",
    "inner angles": "torch.float32",
    "output": "Answer",
    "output y": "torch.float32",
    "output ids": "torch.int64",
}
_POLICIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "default": ({}, {}),
    "inputs-as-they-are": (
        {"cast_forward_inputs": False},
        {"outer x": "torch.float32", "outer angles": "torch.float32"},
    ),
    "output-dtype": ({"output_dtype": torch.float64}, {"output y": "torch.float64"}),
    "evaluated": ({"output_dtype": torch.float64}, {"output y": "torch.float64"}),
}


@clause(
    "fsdp.precision.casts-are-selective", source=f"contract: casts; {POLICY}; torchtitan issue 2881"
)
@pytest.mark.parametrize("policy", _POLICIES)
def test_each_unit_casts_what_its_own_policy_names(world, subject, policy):
    """Each unit MUST follow its own precision policy and cast floating-point tensors only."""
    options, differing = _POLICIES[policy]
    ranks = world.run(seen_dtypes, subject, options, policy != "evaluated")

    wanted = _SEEN | differing
    for rank, seen in enumerate(ranks):
        wrong = {name: (seen[name], right) for name, right in wanted.items() if seen[name] != right}
        judge.holds(not wrong, f"rank {rank}: got and expected {wrong}", given=f"policy {policy}")


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
    return module.seen | {"output": str(output["y"].dtype)}


@clause(
    "fsdp.precision.registered-method",
    needs=("MixedPrecisionPolicy", "register_fsdp_forward_method"),
    source="contract: casts, full-weights; "
    "torch.distributed.fsdp.register_fsdp_forward_method; its test",
)
def test_a_registered_method_gets_the_casts_of_its_unit(world, subject):
    """A registered method's inputs and outputs MUST be cast as those of `forward` are."""
    wanted = {"weight": str(HALF), "x": str(HALF), "ids": "torch.int64", "output": "torch.float64"}
    judge.equal(world.run(seen_in_a_method, subject), wanted, quantity="dtypes in the method")


@dataclass
class Box:
    """An input with a name."""

    x: torch.Tensor


BOXES: dict[str, Any] = {"list": lambda x: [x], "dict": lambda x: {"x": x}, "dataclass": Box}


def inside(box: Any) -> torch.Tensor:
    """What a box holds."""
    if isinstance(box, Box):
        return box.x
    found: torch.Tensor = box[0] if isinstance(box, list) else box["x"]
    return found


class Opens(nn.Linear):
    """A layer that takes a box."""

    def forward(self, box: Any) -> torch.Tensor:
        return super().forward(inside(box))


def boxed(ctx, subject, kind):
    """What is in the caller's box after a forward."""
    x = torch.ones(2, 4, device=ctx.device, requires_grad=True)
    box = BOXES[kind](x)
    in_half(ctx, subject, Opens(4, 4), "root")(box)
    return inside(box) is x, str(inside(box).dtype)


@clause(
    "fsdp.precision.callers-inputs", source="contract: same-containers, dataclasses", worlds=(2,)
)
@pytest.mark.parametrize("kind", BOXES)
def test_what_is_cast_on_the_way_in_stays_the_callers(world, subject, kind):
    """A forward MUST leave what a container of inputs holds as it was, or refuse a dataclass."""
    ordinary = (boxed, subject, "list")
    ranks = refusal.answer_or_refusal(world, boxed, subject, kind, ordinary=ordinary)

    judge.holds(ranks is not None or kind == "dataclass", f"expected a {kind} to be taken")
    if ranks is not None:
        judge.equal(ranks, (True, "torch.float32"), quantity="(same tensor, its dtype) in the box")


@clause(
    "fsdp.precision.float16-over-replicas",
    source="contract: two-dims, reduces; "
    f"{POLICY}, reduce_dtype; FSDP2 divides before and after it adds up in float16",
    worlds=(4,),
)
def test_the_mean_in_float16_is_over_replicas_too(world, subject):
    """On a mesh replicate x shard a reduction in float16 MUST be the mean, or the mesh refused."""
    same_as_alone(world, subject, "narrow 2x2 reduced-half: backward 0")


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
    ordinary = (output_of_fine_weights, subject)
    ranks = refusal.answer_or_refusal(world, quantised, subject, dtype, ordinary=ordinary)

    if ranks is not None:
        codes = Quantised(dtype).codes.detach()
        right = {"codes": codes, "gradient of scale": (codes % 7).float()}
        judge.tensors(ranks, right, quantity="value")
