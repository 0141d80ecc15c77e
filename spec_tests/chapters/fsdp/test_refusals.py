"""Refusals: what cannot be sharded is said at once, by name, on every rank.

An error that comes later comes in a collective, on some ranks, while the others wait.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.laws import additions, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=sharded.FULLY_SHARD, level="production")

PAGE = "torch.distributed.fsdp.fully_shard; test_fully_shard_init"


class Scaled(nn.Module):
    """A layer with a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.ones(()))


class Strided(nn.Module):
    """A parameter whose rows do not lie one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.ones(6, 4).T)


AT_ONCE: dict[str, tuple[Any, str]] = {
    # how to build it, a word that the error must say
    "scalar": (Scaled, "temperature"),
    "strided": (Strided, ""),
    "container": (lambda: nn.ModuleList([nn.Linear(4, 4)]), "ModuleList"),
    "mesh-of-three": (lambda: nn.Linear(4, 4), ""),
}


def error_of(work, kinds=Exception):
    """Type and words of the error that `work` raises; "" if it raises none."""
    try:
        work()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


def says(words, errors, likely):
    """On every rank there must be an error, with one of the words in it."""
    __tracebackhide__ = True
    asked = " or ".join(map(repr, words.split("|"))) if words else ""
    for rank, error in enumerate(errors):
        judge.holds(
            bool(error) and any(word in error for word in words.split("|")),
            f"rank {rank}: expected an error{f' that says {asked}' if asked else ''}, "
            f"got {error[:200] or 'none'}",
            likely=likely,
        )


def refused(ctx, subject, case):
    """What was raised."""
    ctx.impl.fully_shard(nn.Linear(4, 4))  # who cannot do this refuses nothing
    module, options = AT_ONCE[case][0]().to(ctx.device), {}
    if case == "mesh-of-three":
        options["mesh"] = ctx.mesh((1, 1, ctx.world_size), ("a", "b", "c"))
    kinds = (ValueError, NotImplementedError, TypeError)
    return error_of(lambda: ctx.impl.fully_shard(module, **options), kinds)


@clause("fsdp.refusals.at-once-and-by-name", source="contract: as-pytorch; " + PAGE)
@pytest.mark.parametrize("case", AT_ONCE)
def test_what_cannot_be_sharded_is_refused_at_once(world, subject, case):
    """Scalars, strided parameters, containers and odd meshes MUST be refused when sharding."""
    late = "it is found out later, in a collective, on some ranks"
    says(AT_ONCE[case][1], world.run(refused, subject, case), late)


class Table(nn.Module):
    """A layer with a frozen parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, self.table]


def _distributed(ctx):
    from torch.distributed.tensor import Shard, distribute_tensor

    layer = nn.Linear(4, 4)
    mesh = ctx.mesh((ctx.world_size,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    return layer


def _half_on_meta(ctx):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False, device="meta"))


def _layer(ctx):
    return nn.Linear(4, 4)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    # how to build it, options, words of which the error must say one
    "sharded-otherwise": (_distributed, {}, "weight"),
    "sharded-twice": (_layer, {}, "Linear"),
    "half-on-meta": (_half_on_meta, {}, "weight|meta"),
    "integer-dtype": (_layer, {"param_dtype": torch.int32}, "dtype"),
    "odd-option": (_layer, {"reshard_after_forward": "yes"}, "reshard_after_forward"),
    "integers": (lambda ctx: Table(), {}, "table|int64"),
}

BUILT_PLAIN = {"integers": Table, "sharded-otherwise": lambda: nn.Linear(4, 4)}


def tried(ctx, subject, case):
    """Shard and step; the error, or what the step did."""
    ctx.impl.fully_shard(nn.Linear(4, 4))  # who cannot do this refuses nothing
    build, options, _ = BAD[case]
    torch.manual_seed(7)
    module = build(ctx)
    if case != "half-on-meta":
        module.to(ctx.device)
    x = torch.ones(2, 4, device=ctx.device)
    found = {}

    def step():
        given = dict(options)
        if "param_dtype" in options:
            given = {"mp_policy": ctx.impl.MixedPrecisionPolicy(**options)}
        for _ in range(2 if case == "sharded-twice" else 1):
            ctx.impl.fully_shard(module, **given)
        output = module(x)
        output.sum().backward()
        found["output"] = output.detach()

    return error_of(step), found


@clause(
    "fsdp.refusals.by-the-first-step",
    source="contract: as-pytorch, integers; "
    f"{PAGE}: called twice, parameters without values, an option of another type",
)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_on_every_rank_by_the_first_step(world, subject, case):
    """Bad modules and options MUST raise an error naming them, on every rank, by the first step.

    Integers among the parameters may also be right, gathered like the others; so may what is
    distributed already, taken whole and cut anew.
    """
    errors, found = zip(*world.run(tried, subject, case), strict=True)

    if case in BUILT_PLAIN and not any(errors):
        torch.manual_seed(7)
        right = {"output": BUILT_PLAIN[case]()(torch.ones(2, 4)).detach()}
        judge.tensors(found, right, quantity="output")
    else:
        says(BAD[case][2], errors, "it trains, on something else than was meant")


class Inner(torch.Tensor):
    """A tensor of another class, without a method of the all-gather."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Inner:
        """A wrapper without memory."""
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]  # not in stubs
        found.held = inner
        return found  # type: ignore[no-any-return]  # of this class

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # untyped
        """As the inner tensor, wrapped again."""
        args, kwargs = tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
    """What is sent in place of the shard, twice as much, and what the other side should know."""
    return (2 * self.held,), None


def post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
    """What is computed with, and what is freed beside it."""
    return None if out is not None else (outputs[0], ())


class Carried(Inner):
    """One whose gather doubles it."""

    fsdp_pre_all_gather = pre_all_gather
    fsdp_post_all_gather = post_all_gather


class Heir(Carried):
    """A recipe of its own that leaves the gather to its base class."""


class Unfinished(Inner):
    """One that has only the first of the two methods."""

    fsdp_pre_all_gather = pre_all_gather


class Unbegun(Inner):
    """One that has only the second of them."""

    fsdp_post_all_gather = post_all_gather


def carried(ctx, subject, kind):
    """The output of two forwards over ones that their gather doubles; an error."""
    ctx.impl.fully_shard(nn.Linear(4, 4))  # who cannot do this refuses nothing
    layer, found = nn.Linear(4, 4, bias=False), {}

    def step():
        layer.weight = nn.Parameter(kind(torch.ones(4, 4)))
        ctx.impl.fully_shard(layer)
        layer(torch.ones(4)).sum().backward()
        found["output"] = layer(torch.ones(4)).detach()

    return error_of(step), found


@clause(
    "fsdp.refusals.gather-extensions",
    source="contract: gather-methods, one-gather-method; "
    "test_fully_shard_extensions; torchao, which gathers in float8 so",
    transports=("gloo",),  # the class is of a CPU tensor
)
@pytest.mark.parametrize(
    "kind",
    [Carried, Heir, Unfinished, Unbegun],
    ids=["own", "inherited", "one-alone", "second-alone"],
)
def test_how_a_class_is_gathered_is_done_or_refused(world, subject, kind):
    """All-gather methods of a parameter's class MUST be called, or be refused by name.

    One without the other is refused, in any words.
    """
    errors, found = zip(*world.run(carried, subject, kind), strict=True)

    if kind in (Unfinished, Unbegun):
        says("", errors, "one method is taken for both: shards are used as they are")
    elif any(errors):
        says("fsdp_pre_all_gather", errors, "it fails somewhere inside")
    else:
        judge.tensors(found, {"output": torch.full((4,), 8.0)}, quantity="output")


def unequal(ctx, subject, difference):
    """Shard and step where the last rank differs; the error, or "" if there was none."""
    is_other = ctx.rank == ctx.world_size - 1
    torch.manual_seed(7)
    layer: Any = nn.Linear(4, 4)
    if is_other and difference.startswith("shape"):
        layer = nn.Linear(4, 5)
    if is_other and difference == "scalar":
        layer.temperature = nn.Parameter(torch.ones(()))
    options = {}
    if "of-a-" in difference:
        sizes = (2, 2) if difference.endswith("mesh") else (ctx.world_size, 1)
        options["mesh"] = ctx.mesh(sizes, ("replicate", "shard"))
    if is_other and difference.startswith("policy"):
        options["mp_policy"] = ctx.impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with refusal.caught() as error:
        ctx.impl.fully_shard(layer.to(ctx.device), **options)
        layer(torch.ones(2, 4, device=ctx.device)).sum().backward()
    return error["error"]


def judge_unequal(world, subject, difference):
    """All ranks must raise where the last one differs."""
    __tracebackhide__ = True
    refusal.on_all_ranks(
        world.run(unequal, subject, difference),
        given=f"the last rank differs: {difference}",
        likely="not all of them are compared: messages of another size or dtype arrive",
    )


told = rows(clause, judge_unequal)

test_unequal_ranks = told(
    "fsdp.refusals.unequal-ranks",
    "Where ranks differ in modules or policy, all MUST raise by the first step; none hangs.",
    ["shape", "scalar", "policy", "policy-of-a-replica"],
    source="contract: unequal-ranks; "
    "DistributedDataParallel verifies parameters across ranks at construction",
)

test_unequal_ranks_of_a_mesh = told(
    "fsdp.refusals.unequal-ranks-of-a-mesh",
    "Where one rank of a 2-D mesh differs, all MUST raise by the first step, in its row or not.",
    ["shape-of-a-mesh", "policy-of-a-mesh"],
    level="production",
    source="contract: unequal-replicas; "
    "ranks that share a group with none that differs learn of it by those that do",
    worlds=(4,),
)


def without_forward(ctx, subject, how):
    """The error of a backward that has no forward, and the gradients of the next clean step."""
    rank = sharded.on_rank(ctx, subject, "stack")
    with torch.set_grad_enabled(how != "no-grad"):
        loss = rank.loss("3")
    if how == "twice":
        loss.backward()
    said = error_of(loss.backward)
    rank.zero_grad("none")
    return said, rank.backward("0")


@clause(
    "fsdp.refusals.backward-without-forward",
    level="correct",
    source="contract: after-exception; torch.Tensor.backward: a graph is freed by its backward",
)
@pytest.mark.parametrize("how", ["twice", "no-grad"])
def test_a_backward_without_its_forward_is_an_error_and_no_more(world, subject, how):
    """A backward without a live graph MUST raise an error and leave the next step right."""
    said, gradients = zip(*world.run(without_forward, subject, how), strict=True)

    refusal.on_all_ranks(said, given=f"after {how}")
    sharded.judge_gradients(gradients, subject, "stack: backward 0", given=f"after {how}")


def added_later(ctx, subject, addition):
    """Gradients of what is added to a model that has trained for a step."""
    return additions.trained(ctx, sharded.shard, sharded.finish, subject, addition)


@clause(
    "fsdp.refusals.parameters-added-later",
    judges=sharded.BOTH,
    source="contract: added-later; LoRA, added after fully_shard; load_state_dict(assign=True)",
)
@pytest.mark.parametrize("addition", additions.ADDITIONS)
def test_what_is_added_to_a_sharded_module_is_averaged_or_refused(world, subject, addition):
    """Parameters added or replaced after sharding MUST get the mean gradient, or be an error."""
    additions.get_the_mean(world, added_later, subject, addition)
