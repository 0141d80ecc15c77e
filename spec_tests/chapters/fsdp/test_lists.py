"""Lists: modules that are sharded in one call are one unit, wherever in the model they are.

A norm and a head are too small for messages of their own; tied layers must travel together; and a
chunked loss calls the head by itself, after a forward that ran only the norm. Level `production`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import (
    FULLY_SHARD,
    judge_gradients,
    loss_of,
    numel,
    of_integers,
    sharded_toy,
)
from spec_tests.programs.laws import traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=FULLY_SHARD, level="production")


def in_one_call(ctx, subject, units):
    """Operations and elements that a second step gathers and reduces; two layers are one unit."""
    model = sharded_toy(ctx, subject, "even", units=(units,), reshard_after_forward=True)
    loss_of(ctx, model, "even", 1).backward()
    with ctx.recording() as recorder:
        loss_of(ctx, model, "even").backward()
    sent = recorder.log()
    gathers = traffic.messages(sent, ctx.world_size, *traffic.GATHERS)
    reductions = traffic.messages(sent, ctx.world_size, *traffic.REDUCTIONS)
    return [
        (gathers, traffic.gathered(sent, ctx.world_size)),
        (reductions, traffic.reduced(sent)),
    ]


@clause(
    "fsdp.traffic.list-is-one-unit",
    source="contract: lists; "
    "torch.distributed.fsdp.fully_shard: a list of modules, grouped for communication",
)
@pytest.mark.parametrize("units", ["up+down", "down+up"])
def test_modules_of_one_call_travel_together(world, subject, units):
    """Modules that are sharded as a list MUST be gathered together, and reduced together."""
    ranks = world.run(in_one_call, subject, units)

    whole = numel("even")
    for rank, seen in enumerate(ranks):
        for what, times, (operations, elements) in zip(
            ("gathers in forward and backward", "reductions"), (2, 1), seen, strict=True
        ):
            judge.holds(
                operations <= 2 * times and elements == times * whole,
                f"rank {rank}, {what}: expected at most {2 * times} operations for two units (one "
                f"per rank, of those with a root) of {times * whole} elements in all, got "
                f"{operations:g} of {elements}",
                likely="each module of the list is a unit, or is freed before the next one runs",
            )


class Apart(nn.Module):
    """A body whose forward leaves the head to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def sharded_apart(ctx):
    """Body and head as one unit."""
    module = of_integers(Apart()).to(ctx.device)
    ctx.impl.fully_shard([module.body, module.head], reshard_after_forward=True)
    ctx.impl.fully_shard(module)
    return module


def _chunked(module, rank):
    device = next(module.parameters()).device
    rows = module(TOYS["mlp"].batch(7, rank=rank).to(device))
    return sum(sum_of_squares(module.head(chunk)) for chunk in rows.split(2))


def in_a_list(ctx, subject, how):
    """Gradients where a tie runs through a list, or part of it is called by itself."""
    if how == "tied":
        module = sharded_toy(ctx, subject, "tied", units=("encode+decode",))
        for micro in range(2):
            loss_of(ctx, module, "tied", micro).backward()
        return {n: p.grad.full_tensor() for n, p in module.named_parameters()}
    module = sharded_apart(ctx)
    for _ in range(2):
        (ctx.world_size * _chunked(module, ctx.rank)).backward()
    return {n: p.grad.full_tensor() for n, p in module.named_parameters()}


@clause(
    "fsdp.backward.list-of-modules",
    source="contract: lists; "
    "torch.distributed.fsdp.fully_shard: fully_shard([norm, head]), tied or in chunks",
)
@pytest.mark.parametrize("how", ["tied", "apart"])
def test_modules_of_one_call_have_mean_gradients(world, subject, how):
    """Modules that are sharded as a list MUST get mean gradients, tied or called one by one."""
    ranks = world.run(in_a_list, subject, how)

    if how == "tied":
        judge_gradients(ranks, subject, "tied: accumulate 0, backward 1")
        return
    plain = of_integers(Apart())
    for rank in range(world.size):
        (2 * _chunked(plain, rank)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    judge.tensors(ranks, wanted, quantity="mean gradient of two backwards")


def in_part(ctx, subject):
    """Elements gathered by hand after a forward that ran one of two modules.

    Without gradients: nothing is gathered ahead for a backward.
    """
    module = sharded_apart(ctx)
    with torch.no_grad():
        module(TOYS["mlp"].batch(7, rank=ctx.rank).to(ctx.device))
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

    whole = sum(p.numel() for p in of_integers(Apart()).parameters())
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
