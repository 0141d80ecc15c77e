"""Settings of PyTorch's FSDPModule.

Each setting promises something about what is sent, kept or divided, and that gradients stay right.
Only these clauses notice a setter that is accepted and ignored. Level `production`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import (
    FULLY_SHARD,
    SEED,
    Sharded,
    having,
    mean_gradients,
    numel,
)
from spec_tests.programs.laws import equivalence, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=FULLY_SHARD, level="production")


@clause(
    "fsdp.accumulation.last-backward", source="contract: setters; FSDPModule.set_is_last_backward"
)
def test_reductions_that_need_not_be_finished_are_by_the_last_backward(world, subject):
    """After the last backward of a window, gradients MUST be the mean over all of it."""
    calls = "last False, backward 0, backward 1, last True, backward 2"
    mean_gradients(world, subject, "stack", calls)


@clause(
    "fsdp.accumulation.clears-what-is-under-way",
    source="contract: setters, zero-grad; "
    "FSDPModule.set_is_last_backward; torch.optim.Optimizer.zero_grad",
)
def test_zero_grad_reaches_a_reduction_that_is_not_finished(world, subject):
    """Gradients from before `zero_grad` MUST NOT reappear, even with their reduction in flight."""
    calls = "last False, backward 0, zero_grad, last True, backward 1"
    mean_gradients(world, subject, "stack", calls)


WINDOWS: dict[str, Any] = {
    # the toy, its units, and how each micro-batch calls it
    "kept": ("even", "children", ({}, {})),
    "cleared": ("even", "children", ({}, {})),
    "unused-in-last": ("branches", "layers", ({"use": "abc"}, {"use": "ab"})),
    "one-shard": ("even", "children", ({}, {})),
    "by-the-other-setter": ("even", "children", ({}, {})),
    "again": ("even", "children", ({}, {})),
}


def over_replicas(ctx, subject, case):
    """Two micro-batches on a mesh of two dimensions, replicas averaged with the second.

    In the case `again` another such window, whose gradients are cleared, comes before.
    """
    toy, units, uses = WINDOWS[case]
    names = ("replicate", "shard")
    sizes = (4, 1) if case == "one-shard" else (2, 2)
    mesh = ctx.mesh(sizes, names)
    sharded = Sharded(ctx, subject, toy, units=units, mesh=mesh)
    for _ in range(1 + (case == "again")):
        sharded.zero_grad()
        sent = 0
        for micro, flags in enumerate(uses):
            if case == "by-the-other-setter" and micro == 1:  # which switches both on
                sharded.wrapped.set_requires_gradient_sync(True)
            else:
                sharded.wrapped.set_requires_all_reduce(micro == 1)
            sent += traffic.reduced(traffic.together(*sharded.recorded(micro, **flags)))
            if case == "cleared" and micro == 0:
                sharded.zero_grad()
    return sent, sharded.gradients()


@clause(
    "fsdp.accumulation.all-reduce-at-the-last",
    source="contract: setters, zero-grad; "
    "FSDPModule.set_requires_all_reduce; test_fully_shard_training, HSDP",
    worlds=(4,),
)
@pytest.mark.parametrize("case", WINDOWS)
def test_replicas_are_averaged_once_per_window(world, subject, case):
    """Without all-reduce, micro-batches MUST be summed over shards and averaged with the last one.

    What waits for replicas waits like any other gradient: `zero_grad` discards it, and the last
    micro-batch averages it also where that does not use its layer.
    """
    sent, gradients = zip(*world.run(over_replicas, subject, case), strict=True)

    toy, _, uses = WINDOWS[case]
    equivalence.mean_gradients(
        gradients,
        toy,
        SEED,
        micros=(1,) if case == "cleared" else (0, 1),
        flags=lambda rank, micro: uses[micro],
    )
    whole = numel("even")
    if toy == "even":
        window = whole if case == "one-shard" else 2 * whole + whole // 2
        judge.equal(sent, window, quantity="elements reduced in both backwards")


def without_all_reduce(ctx, subject):
    """Gradients of two micro-batches on a mesh of one dimension, where all-reduce is off."""
    sharded = Sharded(ctx, subject, "even")
    sharded.wrapped.set_requires_all_reduce(False)
    sharded.backward(0)
    sharded.backward(1)
    return sharded.gradients()


@clause(
    "fsdp.accumulation.nothing-to-all-reduce",
    source="contract: setters; "
    "FSDPModule.set_requires_all_reduce: for HSDP; test_fully_shard_training",
    worlds=(2,),
)
def test_without_replicas_there_is_no_all_reduce_to_leave_out(world, subject):
    """On a mesh of one dimension gradients MUST be means, whatever is said of the all-reduce."""
    ranks = world.run(without_all_reduce, subject)
    equivalence.mean_gradients(ranks, "even", SEED, micros=(0, 1))


def divided(ctx, subject, factor, mesh=None):
    """Gradients of a step whose sums are divided by `factor`, on a mesh of these sizes."""
    names = ("replicate", "shard")
    options: dict[str, Any] = {}
    if mesh is not None:
        options["mesh"] = ctx.mesh(mesh, names)
    sharded = Sharded(ctx, subject, "stack", **options)
    for part in having(sharded.module, "set_gradient_divide_factor"):
        part.set_gradient_divide_factor(factor)
        # In float32 FSDP2 leaves the factor to the backend, and gloo knows none.
        sums: Any = getattr(part, "set_force_sum_reduction_for_comms", None)
        if sums is not None:
            sums(True)
    return sharded.gradients_after("backward 0")


@clause(
    "fsdp.backward.divide-factor", source="contract: setters; FSDPModule.set_gradient_divide_factor"
)
@pytest.mark.parametrize("factor", [1.0, 4.0, 0.5])
def test_sums_are_divided_by_the_factor(world, subject, factor):
    """With a divide factor, gradients MUST be the sum over ranks divided by it alone."""
    _judge_divided(world.run(divided, subject, factor), factor)


@clause(
    "fsdp.backward.divide-factor-over-replicas",
    source="contract: setters; FSDPModule.set_gradient_divide_factor",
    worlds=(4,),
)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_sums_over_replicas_are_divided_by_the_factor(world, subject, mesh):
    """With a divide factor, the sum over shards and replicas MUST be divided by it alone.

    Also with one rank per shard group, where nothing is reduced over shards (pytorch pull request
    167178).
    """
    _judge_divided(world.run(divided, subject, 2.0, mesh), 2.0)


def _judge_divided(ranks, factor):
    mean = equivalence.full_batch_gradients("stack", SEED, ranks=range(len(ranks)))
    wanted = equivalence.scaled(mean, len(ranks) / factor)
    wanted = {n: torch.zeros_like(ranks[0][n]) if g is None else g for n, g in wanted.items()}
    judge.tensors(ranks, wanted, quantity=f"sum over ranks / {factor}")


def without_weights(ctx, subject):
    """What a step gathers with unshard-in-backward off for an embedding, and gradients."""
    sharded = Sharded(ctx, subject, "even", reshard_after_forward=True)
    embed: Any = sharded.module.embed
    embed.set_unshard_in_backward(False)
    sharded.backward(1)
    sent = traffic.together(*sharded.recorded(0))
    return traffic.gathered(sent, ctx.world_size), sharded.gradients()


@clause(
    "fsdp.traffic.not-unsharded-in-backward",
    source="contract: setters; FSDPModule.set_unshard_in_backward",
)
def test_a_unit_that_needs_no_weights_in_backward_is_not_gathered_there(world, subject):
    """With unshard-in-backward off, a unit MUST NOT be gathered in backward; gradients stay right.

    The gradient of an embedding needs the rows' numbers, and no weight.
    """
    gathered, gradients = zip(*world.run(without_weights, subject), strict=True)

    expected = 2 * numel("even") - numel("even", "embed")
    judge.equal(gathered, expected, quantity="elements gathered in forward and backward")
    equivalence.mean_gradients(gradients, "even", SEED, micros=(0, 1))


LESS = {
    # of the copies that are gathered in a pass, reduced in it, and gathered in the next one: 1
    # where the setting saves one of what it is told to
    "set_requires_gradient_sync": (0, 1, 0),
    "set_reshard_after_forward": (1, 0, 0),
    "set_reshard_after_backward": (0, 0, 1),
}


def switched_off(ctx, subject, setter, **recurse):
    """What two passes send, the first with a setting that the outermost unit is told."""
    sharded = Sharded(ctx, subject, "even", reshard_after_forward=True)
    sharded.follow("backward 5, zero_grad")
    change: Any = getattr(sharded.wrapped, setter)
    change(False, **recurse)
    first = traffic.together(*sharded.recorded(0))
    change(True, **recurse)
    second = traffic.together(*sharded.recorded(1))
    gathered = [traffic.gathered(log, ctx.world_size) for log in (first, second)]
    return [gathered[0], traffic.reduced(first), gathered[1]], sharded.gradients()


@clause(
    "fsdp.traffic.not-recursive",
    source="contract: setters; FSDPModule: setters that take `recurse`",
)
@pytest.mark.parametrize("setter", LESS)
def test_a_setting_without_recursion_leaves_inner_units_alone(world, subject, setter):
    """With `recurse=False`, a setter MUST change what the outermost unit sends alone."""
    _judge_switched(world.run(switched_off, subject, setter, recurse=False), setter, "gain")


@clause(
    "fsdp.traffic.recursive", source="contract: setters; FSDPModule: setters that take `recurse`"
)
@pytest.mark.parametrize("setter", LESS)
def test_a_setting_reaches_inner_units(world, subject, setter):
    """Unless told otherwise, a setter MUST change what the inner units send, too."""
    _judge_switched(world.run(switched_off, subject, setter), setter)


def _judge_switched(ranks, setter, *changed):
    sent, gradients = zip(*ranks, strict=True)
    whole, part = numel("even"), numel("even", *changed)
    copies = zip((2, 1, 2), LESS[setter], strict=True)
    expected = [whole * number - part * less for number, less in copies]
    what = "elements gathered in a pass, reduced in it, and gathered in the next pass"
    judge.equal(sent, expected, quantity=what)
    equivalence.mean_gradients(gradients, "even", SEED, micros=(0, 1))


def along_columns(ctx, subject):
    """The error, or the local shape, of a weight to be sharded along dim 1."""
    from torch.distributed.tensor import Shard

    layer: Any = nn.Linear(4, 6, bias=False, device=ctx.device)
    ctx.impl.fully_shard(nn.Linear(4, 6))  # who cannot do this refuses nothing
    try:
        ctx.impl.fully_shard(layer, shard_placement_fn=lambda parameter: Shard(1))
    except (ValueError, NotImplementedError, TypeError) as error:
        return {"says": str(error), "rows": None}
    return {"says": "", "rows": tuple(layer.weight.to_local().shape)}


@clause(
    "fsdp.refusals.other-dims",
    source="contract: as-pytorch; torch.distributed.fsdp.fully_shard, shard_placement_fn",
)
def test_another_dim_is_followed_or_refused(world, subject):
    """A request to shard along another dim MUST be honoured or refused, never sharded by rows."""
    ranks = world.run(along_columns, subject)

    right = (6, 4 // world.size)
    for rank, seen in enumerate(ranks):
        judge.holds(
            seen["rows"] == right or "shard_placement_fn" in seen["says"],
            f"rank {rank}: expected a local shape of {right}, or an error that says "
            f"'shard_placement_fn', got {seen['rows'] or seen['says']}",
            likely="the option is taken and not read",
        )
