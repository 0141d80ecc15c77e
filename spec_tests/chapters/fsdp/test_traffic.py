"""Traffic: how often weights are gathered and gradients reduced, in copies of the model.

Sharding saves memory and sends one or two more copies of the weights per step than replication.
The settings trade one for the other, and only the traffic shows a setting that is ignored. Traffic
is counted by meaning: a gather may be one all-gather, or a broadcast or a point-to-point message
from each rank. It is counted over whole steps, the first one left out: the gathers of a backward
may be launched in its forward, and those of a forward at the end of the step before.
Level `production`. See Rajbhandari et al. 2020, section 7, and Zhao et al. 2023, section 3.2.

Large worlds: a pass on many ranks gathers what it does on two, and shards are as many parts.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import (
    FULLY_SHARD,
    loss_of,
    numel,
    on_rank,
    recorded,
    shard,
    sharded_toy,
    units_of,
)
from spec_tests.programs.calls import parsed
from spec_tests.programs.laws import agreement, footprint, large_worlds, refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.pretended import pretended
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="production")

STAGES = "Rajbhandari et al. 2020, section 7; test_fully_shard_comm"


def steps_sent(ctx, subject, toy, reshard_after_forward, keeps=False, flags=(True,), steps=3):
    """What the passes of every step send, and its update."""
    model = sharded_toy(ctx, subject, toy, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-16, foreach=False)
    told: dict[str, bool] = {}
    found = []

    def tell(setter, flag):
        """Nothing is called where that is so already."""
        if told.get(setter, True) != flag:
            getattr(model, setter)(flag)
        told[setter] = flag

    for _ in range(steps):
        with ctx.recording() as passes:
            for micro, is_reduced in enumerate(flags):
                tell("set_requires_gradient_sync", is_reduced)
                tell("set_reshard_after_backward", not keeps or micro == len(flags) - 1)
                loss_of(ctx, model, toy, micro).backward()
        with ctx.recording() as update:
            optimizer.step()
            optimizer.zero_grad()
        found.append({"passes": passes.log(), "update": update.log()})
    return found


def _judge_volumes(ranks, wanted, given):
    """`wanted`: elements gathered in a step, and reduced."""
    __tracebackhide__ = True
    for rank, seen in enumerate(ranks):
        for number, step in enumerate(seen[1:], start=2):
            log = traffic.together(*step.values())
            got = (traffic.gathered(log, len(ranks)), traffic.reduced(log))
            judge.holds(
                got == wanted,
                f"rank {rank}, step {number}: expected {wanted[0]} elements gathered and "
                f"{wanted[1]} reduced in the whole step, got {got[0]} and {got[1]}",
                likely="a setting is not read, or something is gathered or reduced twice",
                given=given,
            )


@clause(
    "fsdp.traffic.copies-per-step",
    source="contract: no-extra-bytes, trained-only; " + STAGES,
    worlds=(2, 3),
)
@pytest.mark.parametrize("setting", [True, False, None])
def test_a_step_gathers_and_reduces_as_often_as_the_setting_says(world, subject, setting):
    """A step MUST gather one copy, what was freed after forward once more, and reduce one copy."""
    ranks = world.run(steps_sent, subject, "even", setting)

    whole, root = numel("even"), numel("even", "gain")
    again = {True: whole, False: 0, None: whole - root}[setting]
    _judge_volumes(ranks, (whole + again, whole), f"reshard_after_forward={setting}")


@clause(
    "fsdp.traffic.ints-for-true-and-false",
    source="contract: partial-reshard; "
    "torch.distributed.fsdp.fully_shard: reshard_after_forward as an int",
    worlds=(2, 3),
)
@pytest.mark.parametrize("kept", [False, True], ids=["all-ranks", "one"])
def test_the_ints_at_both_ends_mean_true_and_false(world, subject, kept):
    """`reshard_after_forward` of all ranks MUST act as True and 1 as False, or be refused."""
    setting, ordinary = 1 if kept else world.size, (steps_sent, subject, "even", True)
    ranks = refusal.answer_or_refusal(
        world, steps_sent, subject, "even", setting, ordinary=ordinary
    )

    if ranks is not None:
        whole = numel("even")
        wanted = (whole if kept else 2 * whole, whole)
        _judge_volumes(ranks, wanted, f"reshard_after_forward={setting}")


@clause(
    "fsdp.traffic.copies-per-window",
    source=f"contract: unreduced, resharding; {STAGES}; Efficient DL week 5, the bonuses",
)
@pytest.mark.parametrize("reduces", ["each", "last"])
@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_a_window_sends_as_often_as_its_settings_say(world, subject, keeps, reduces):
    """In a window of micro-batches, kept weights MUST NOT be gathered again, nor sums reduced."""
    flags = (True, True, True) if reduces == "each" else (False, False, True)
    ranks = world.run(steps_sent, subject, "even", not keeps, keeps, flags, 2)

    whole = numel("even")
    wanted = (whole if keeps else 2 * len(flags) * whole, sum(flags) * whole)
    given = f"{len(flags)} micro-batches, weights {'kept' if keeps else 'freed'}, reduced {reduces}"
    _judge_volumes(ranks, wanted, given)


def half_frozen(ctx, subject):
    """What a step gathers and reduces with some parameters frozen."""
    rank = on_rank(ctx, subject, "even root")
    for name, parameter in rank.named():
        parameter.requires_grad_(name not in ("up.bias", "down.weight"))
    sent = traffic.together(*recorded(ctx, rank, "0"))
    return traffic.gathered(sent, ctx.world_size), traffic.reduced(sent)


@clause(
    "fsdp.traffic.frozen-not-reduced",
    source="contract: trained-only; "
    "test_fully_shard_frozen: reduce-scatter of trainable elements only",
)
def test_frozen_parameters_are_gathered_and_not_reduced(world, subject):
    """Frozen parameters MUST be gathered with the others, and MUST NOT be reduced."""
    ranks = world.run(half_frozen, subject)

    whole = numel("even")
    trains = numel("even", "embed.weight", "up.weight", "gain")
    for rank, seen in enumerate(ranks):
        judge.holds(
            seen == (whole, trains),
            f"rank {rank}: expected {whole} elements gathered and {trains} reduced, got {seen}",
            likely="zeros are sent for frozen parameters",
        )


@clause(
    "fsdp.traffic.one-gather-per-unit",
    source="contract: one-collective; "
    "test_fully_shard_comm: one collective per group of parameters",
    worlds=(2, 3),
)
def test_the_parameters_of_a_unit_travel_together(world, subject):
    """A unit MUST be gathered in one operation, or one per rank, and reduced in the same way.

    Small messages cost their latency: eleven parameters in eleven gathers wait eleven times.
    """
    ranks = world.run(steps_sent, subject, "ragged", True)

    units = len(units_of(TOYS["ragged"].build(7))) + 1  # and the root
    for rank, seen in enumerate(ranks):
        step = traffic.together(*seen[-1].values())
        gathers = traffic.messages(step, world.size, *traffic.GATHERS)
        reductions = traffic.messages(step, world.size, *traffic.REDUCTIONS)
        judge.holds(
            gathers <= 2 * units and reductions <= units,
            f"rank {rank}: expected at most {2 * units} gathers and {units} reductions in a step "
            f"for {units} units (a broadcast or reduce per rank is one), got {gathers:g} and "
            f"{reductions:g}",
            likely="parameters are sent one by one",
        )


@clause(
    "fsdp.traffic.same-on-all-ranks",
    source="contract: one-collective; pytorch issue 174862",
    worlds=(3,),
)
def test_all_ranks_issue_the_same_collectives(world, subject):
    """All ranks MUST issue the same sequence of collectives, those without rows too."""
    ranks = world.run(steps_sent, subject, "ragged", True)

    steps = [traffic.together(*rank[-1].values()) for rank in ranks]
    agreement.same_collectives(steps, given="third step")


@clause(
    "fsdp.traffic.update-is-silent",
    source="contract: as-pytorch; Rajbhandari et al. 2020: each rank updates its own rows",
)
def test_an_update_sends_nothing(world, subject):
    """An optimizer step MUST send nothing but gathers that the passes then send no more."""
    ranks = world.run(steps_sent, subject, "even", True)

    updates = [rank[-1]["update"] for rank in ranks]
    traffic.silent([traffic.without_gathers(log) for log in updates], when="in the optimizer step")
    if any(traffic.volume(log, *traffic.GATHERS) for log in updates):
        _judge_volumes(ranks, (2 * numel("even"), numel("even")), "gathers in the optimizer step")


def gathered_by_hand(ctx, subject):
    """What a second unshard sends, and a forward after it."""
    rank = on_rank(ctx, subject, "even held")
    with ctx.recording() as first:
        rank.follow(parsed("unshard now"))
    with ctx.recording() as second:
        rank.follow(parsed("unshard now, forward 0"))
    return [traffic.gathered(recorder.log(), ctx.world_size) for recorder in (first, second)]


@clause("fsdp.traffic.unsharded-once", source="contract: by-hand; FSDPModule.unshard")
def test_what_is_unsharded_is_not_gathered_again(world, subject):
    """What was unsharded by hand MUST NOT be gathered again, by hand or by the forward after it."""
    ranks = world.run(gathered_by_hand, subject)

    judge.equal(ranks, [numel("even"), 0], quantity="elements gathered first and afterwards")


def recomputing(ctx, subject):
    """Elements gathered in a step where checkpoint() surrounds every unit."""
    torch.manual_seed(7)
    layers: Any = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(ctx.device)
    for layer in layers:
        ctx.impl.fully_shard(layer, reshard_after_forward=True)
    x = torch.ones(2, 4, device=ctx.device, requires_grad=True)
    for _ in range(2):
        with ctx.recording() as recorder:
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False)
            y.sum().backward()
    return traffic.gathered(recorder.log(), ctx.world_size)


@clause(
    "fsdp.traffic.recomputation",
    source="contract: recomputed-unit; "
    "a course's scripts: checkpoint() around each unit, ten gathers where seven would do",
)
def test_a_unit_that_is_recomputed_is_gathered_once_in_backward(world, subject):
    """Where checkpoint surrounds a unit, a step MUST gather it twice: for forward and backward."""
    ranks = world.run(recomputing, subject)

    whole = 3 * (4 * 4 + 4)
    judge.equal(ranks, 2 * whole, quantity="elements gathered in forward and backward")


WIDTH, DEPTH = 64, 4
UNIT = WIDTH * WIDTH
"""Elements of a layer: 64 ranks keep a row of it each."""


def one_rank(ctx, subject, rank, num_ranks):
    """What `rank` of `num_ranks` sends in its second step, and keeps after it."""
    seen: dict[str, Any] = {}
    with pretended(rank, num_ranks), ctx.recording() as life:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
        model = shard(ctx, subject, nn.Sequential(*layers), reshard_after_forward=True)
        del layers
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for _ in range(2):
            with ctx.recording() as recorder:
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
            seen["sent"] = recorder.log()
            optimizer.zero_grad()
        gc.collect()
        seen["bytes"] = life.live_bytes
    return seen


@clause(
    "fsdp.traffic.any-world-size",
    source="contract: no-extra-bytes; "
    "Rajbhandari et al. 2020, section 7: volume does not depend on the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_a_step_sends_no_more_on_many_ranks(world, subject, num_ranks):
    """On 8 and 64 ranks a step MUST send what it sends on two: three copies of the model."""
    ends = large_worlds.first_and_last(world, num_ranks, one_rank, subject)

    whole = DEPTH * UNIT
    for end, seen in ends.items():
        got = (traffic.gathered(seen["sent"], num_ranks), traffic.reduced(seen["sent"]))
        judge.holds(
            got == (2 * whole, whole),
            f"{end} rank of {num_ranks}: expected {2 * whole} elements gathered and {whole} "
            f"reduced in a step, got {got[0]} and {got[1]}",
            likely="rows are padded to a multiple, or something is sent by each rank",
        )
    logs = [seen["sent"] for seen in ends.values()]
    agreement.same_collectives(logs, given=f"a step, {large_worlds.both(num_ranks)}")


def sent_by_a_late_wait(ctx, subject):
    """What waiting for a gather sends, and leaves, once the unit was freed again."""
    model = sharded_toy(ctx, subject, "even")
    handle = model.unshard(async_op=True)
    model.reshard()
    with ctx.recording() as recorder:
        handle.wait()
    kinds = sorted({type(p).__name__ for p in model.parameters()})
    return traffic.gathered(recorder.log(), ctx.world_size), kinds


@clause("fsdp.traffic.wait-after-reshard", source="contract: async-unshard")
def test_waiting_for_a_discarded_gather_sends_nothing(world, subject):
    """After `reshard`, waiting for a gather from before it MUST NOT gather or unshard again."""
    gathered, kinds = zip(*world.run(sent_by_a_late_wait, subject), strict=True)
    judge.equal(gathered, 0, quantity="elements gathered by wait() after reshard()")
    judge.equal(kinds, ["DTensor"], quantity="kinds of parameters after that wait()")


@clause(
    "fsdp.footprint.any-world-size",
    source="contract: shards-only; "
    "Rajbhandari et al. 2020, figure 1: memory falls with the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_what_stays_is_one_part_in_so_many_ranks(world, subject, num_ranks):
    """Between steps a rank of 8 or 64 MUST hold one part in 8 or 64 of weights and moments.

    One layer may be on its way to the next forward.
    """
    ends = large_worlds.first_and_last(world, num_ranks, one_rank, subject)

    shards = 4 * DEPTH * UNIT // num_ranks
    footprint.at_most(
        [seen["bytes"] for seen in ends.values()],
        {
            "shards": shards,
            "moments": 2 * shards,
            "a layer that is gathered ahead": 4 * UNIT,
            "counters and inputs": 512 * DEPTH,
        },
        quantity="bytes after a step",
        likely="rows are padded to a multiple, or ranks beyond a number share nothing",
        given=f"{large_worlds.both(num_ranks)}, {DEPTH} layers of {4 * UNIT} bytes",
    )
