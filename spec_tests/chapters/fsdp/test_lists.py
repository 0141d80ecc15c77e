"""Lists: modules that are sharded in one call are one unit, wherever in the model they are.

A norm and a head are too small for messages of their own; tied layers must travel together; and a
chunked loss calls the head by itself, after a forward that ran only the norm. Level `production`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.laws import traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=sharded.FULLY_SHARD, level="production")


def in_one_call(ctx, subject, units):
    """What a second step sends; two layers are one unit."""
    model = sharded.sharded_toy(ctx, subject, "even", units=(units,), reshard_after_forward=True)
    for micro in (1, 0):
        batch = TOYS["even"].batch(sharded.SEED, rank=ctx.rank, micro=micro).to(ctx.device)
        with ctx.recording() as recorder:
            sum_of_squares(model(batch)).backward()
    return recorder.log()


@clause(
    "fsdp.traffic.list-is-one-unit",
    source="contract: lists; "
    "torch.distributed.fsdp.fully_shard: a list of modules, grouped for communication",
)
@pytest.mark.parametrize("units", ["up+down", "down+up"])
def test_modules_of_one_call_travel_together(world, subject, units):
    """Modules that are sharded as a list MUST be gathered together, and reduced together."""
    logs = world.run(in_one_call, subject, units)

    whole = sharded.numel("even")
    sent = [(traffic.gathered(log, world.size), traffic.reduced(log)) for log in logs]
    judge.equal(sent, (2 * whole, whole), quantity="elements (gathered, reduced)")
    likely = "each module of the list is a unit, or is freed before the next runs"
    sharded.judge_messages(logs, 2, likely)


class Apart(nn.Module):
    """A body whose forward leaves the head to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def chunked(model, x):
    """The head by itself, on parts of what the body gives."""
    parts = model(x).split(2)
    return {f"chunk {number}": model.head(part) for number, part in enumerate(parts)}


def apart():
    """Body and head, of integers."""
    return sharded.of_integers(Apart())


LISTS = {
    "tied": sharded.toy_of("tied", ["encode+decode"]),
    "apart": sharded.Own(apart, chunked, units=["body+head"]),
}


@clause(
    "fsdp.backward.list-of-modules",
    source="contract: lists, tied; "
    "torch.distributed.fsdp.fully_shard: fully_shard([norm, head]), tied or in chunks",
)
@pytest.mark.parametrize("how", ["tied", "apart"])
def test_modules_of_one_call_have_mean_gradients(world, subject, how):
    """Modules that are sharded as a list MUST get mean gradients, tied or called one by one."""
    options: Any = {"is_second": True, "reshard_after_forward": True}
    if how == "tied":  # who refuses a tie in one unit may refuse it in a list
        one, usual = sharded.toy_of("tied", []), LISTS["apart"]
        if sharded.steps_as_alone(world, subject, one, usual=usual, **options) is None:
            return
    sharded.steps_as_alone(world, subject, LISTS[how], **options)


def in_part(ctx, subject):
    """Elements gathered by hand after a forward that ran one of two modules.

    Without gradients: nothing is gathered ahead for a backward.
    """
    module: Any = apart().to(ctx.device)
    sharded.shard(ctx, subject, module, ("body+head",), reshard_after_forward=True)
    with torch.no_grad():
        module(sharded.inputs(ctx.rank).to(ctx.device))
    with ctx.recording() as by_hand:
        module.body.unshard()
    return traffic.gathered(by_hand.log(), ctx.world_size)


@clause(
    "fsdp.footprint.part-of-a-list",
    source="contract: lists; "
    "torch.distributed.fsdp.fully_shard: a forward may run only some of a list",
)
def test_a_list_of_which_a_part_ran_is_freed(world, subject):
    """After a forward that ran part of a list, the full weights of the whole list MUST be freed."""
    ranks = world.run(in_part, subject)

    whole = sum(p.numel() for p in apart().parameters())
    judge.equal(ranks, whole, quantity="elements that had to be gathered again")


def sliced(ctx, subject):
    """The name of the class of a slice of a sharded container."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(ctx.device)
    ctx.impl.fully_shard(model)
    return type(model[:1]).__name__


@clause(
    "fsdp.init.slices-are-plain",
    source="contract: slices; torch.distributed.fsdp.fully_shard; FSDPModule.__new__",
    worlds=(2,),
)
def test_a_slice_of_a_sharded_container_is_not_sharded(world, subject):
    """A slice of a sharded container MUST be an object of the container's own class."""
    judge.equal(world.run(sliced, subject), "Sequential", quantity="class of a slice")
