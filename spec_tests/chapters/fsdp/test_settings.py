"""Settings of PyTorch's FSDPModule.

Each setting promises something about what is sent, kept or divided, and that gradients stay right.
Only these clauses notice a setter that is accepted and ignored. Level `production`.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=sharded.FULLY_SHARD, level="production")
holds = rows(clause, same_as_alone)

test_last_backward = holds(
    "fsdp.accumulation.last-backward",
    "After the last backward of a window, gradients MUST be the mean over all of it.",
    "stack: early 0, early 1, backward 2",
    source="contract: setters; FSDPModule.set_is_last_backward",
)

WINDOWS = {
    # Replicas are averaged again from the next micro-batch on: by the same setter after an odd
    # one, by the setter that switches both on after an even one.
    "kept": "even 2x2: partly 1, backward 0",
    "cleared": "even 2x2: partly 1, zero_grad none, backward 0",
    "unused-in-last": "branches-in-turn layers 2x2: partly 0, backward 1",
    "one-shard": "even replicas: partly 1, backward 0",
    "by-the-other-setter": "even 2x2: partly 0, backward 1",
    "again": "even 2x2: partly 1, backward 0, zero_grad none, partly 3, backward 2",
}

test_all_reduce_at_the_last = holds(
    "fsdp.accumulation.all-reduce-at-the-last",
    "Without all-reduce, micro-batches MUST be summed over shards and averaged with the last one.",
    # What waits for replicas waits like any other gradient: `zero_grad` discards it, and the last
    # micro-batch averages it also where that does not use its layer.
    WINDOWS,
    looks=("sent",),
    source="contract: setters, zero-grad; "
    "FSDPModule.set_requires_all_reduce; test_fully_shard_training, HSDP",
    worlds=(4,),
)

test_divide_factor = holds(
    "fsdp.backward.divide-factor",
    "With a divide factor, gradients MUST be the sum over ranks divided by it alone.",
    {word: f"stack {word}: backward 0" for word in ("undivided", "by-four", "by-a-half")},
    source="contract: setters; FSDPModule.set_gradient_divide_factor",
)

test_divide_factor_over_replicas = holds(
    "fsdp.backward.divide-factor-over-replicas",
    "With a divide factor, the sum over shards and replicas MUST be divided by it alone.",
    # Also with one rank per shard group: nothing is reduced over shards (pytorch pull 167178).
    {"2x2": "stack 2x2 by-two: backward 0", "4x1": "stack replicas by-two: backward 0"},
    source="contract: setters; FSDPModule.set_gradient_divide_factor",
    worlds=(4,),
)


def without_weights(ctx, subject):
    """What a step gathers with unshard-in-backward off for an embedding, and gradients."""
    rank = sharded.on_rank(ctx, subject, "even freed")
    embed: Any = rank.module.embed
    embed.set_unshard_in_backward(False)
    rank.backward("1")
    sent = sharded.recorded(ctx, rank, "0")
    return traffic.gathered(sent, ctx.world_size), rank.gradients()


@clause(
    "fsdp.traffic.not-unsharded-in-backward",
    source="contract: setters; FSDPModule.set_unshard_in_backward",
)
def test_a_unit_that_needs_no_weights_in_backward_is_not_gathered_there(world, subject):
    """With unshard-in-backward off, a unit MUST NOT be gathered in backward; gradients stay right.

    The gradient of an embedding needs the rows' numbers, and no weight.
    """
    gathered, gradients = zip(*world.run(without_weights, subject), strict=True)

    expected = 2 * sharded.numel("even") - sharded.numel("even", "embed")
    judge.equal(gathered, expected, quantity="elements gathered in forward and backward")
    sharded.judge_gradients(gradients, subject, "even: accumulate 1, backward 0")


LESS = {
    # of the copies that are gathered in a pass, reduced in it, and gathered in the next one: 1
    # where the setting saves one of what it is told to
    "set_requires_gradient_sync": (0, 1, 0),
    "set_reshard_after_forward": (1, 0, 0),
    "set_reshard_after_backward": (0, 0, 1),
}


def switched_off(ctx, subject, setter, **recurse):
    """What two passes send, the first with a setting that the outermost unit is told."""
    rank = sharded.on_rank(ctx, subject, "even freed")
    rank.follow("backward 5, zero_grad none")
    change: Any = getattr(rank.wrapped, setter)
    change(False, **recurse)
    first = sharded.recorded(ctx, rank, "0")
    change(True, **recurse)
    second = sharded.recorded(ctx, rank, "1")
    gathered = [traffic.gathered(log, ctx.world_size) for log in (first, second)]
    return [gathered[0], traffic.reduced(first), gathered[1]], rank.gradients()


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
    whole, part = sharded.numel("even"), sharded.numel("even", *changed)
    copies = zip((2, 1, 2), LESS[setter], strict=True)
    expected = [whole * number - part * less for number, less in copies]
    what = "elements gathered in a pass, reduced in it, and gathered in the next pass"
    judge.equal(sent, expected, quantity=what)
    sharded.judge_gradients(gradients, "fully_shard", "even: accumulate 0, backward 1")


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
    wrong = {
        rank: found
        for rank, found in enumerate(ranks)
        if found["rows"] != right and "shard_placement_fn" not in found["says"]
    }
    judge.holds(
        not wrong,
        f"expected a local shape of {right}, or an error that says 'shard_placement_fn', got by "
        f"rank {wrong}",
        likely="the option is taken and not read",
    )
