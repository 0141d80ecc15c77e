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

from spec_tests.chapters.fsdp.sharded import (
    FULLY_SHARD,
    judge_messages,
    judge_sent,
    numel,
    sent_by,
    shard,
    units_of,
)
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import agreement, footprint, large_worlds, refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.pretended import pretended
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="production")

STAGES = "Rajbhandari et al. 2020, section 7; test_fully_shard_comm"

STEP = "backward 0, step"


@clause(
    "fsdp.traffic.copies-per-step",
    source="contract: no-extra-bytes, trained-only; " + STAGES,
    worlds=(2, 3),
)
@pytest.mark.parametrize("setting", ["freed", "held", "usual"], ids=["True", "False", "None"])
def test_a_step_gathers_and_reduces_as_often_as_the_setting_says(world, subject, setting):
    """A step MUST gather one copy, what was freed after forward once more, and reduce one copy."""
    scene = f"even {setting}"
    logs = world.run(sent_by, subject, scene, STEP, STEP, STEP)

    whole, root = numel("even"), numel("even", "gain")
    again = {"freed": whole, "held": 0, "usual": whole - root}[setting]
    judge_sent(logs, whole + again, whole, f"{scene}, third step")


@clause(
    "fsdp.traffic.ints-for-true-and-false",
    source="contract: partial-reshard; "
    "torch.distributed.fsdp.fully_shard: reshard_after_forward as an int",
    worlds=(2,),
)
@pytest.mark.parametrize("copies", [2, 1], ids=["all-ranks", "one"])
def test_the_ints_at_both_ends_mean_true_and_false(world, subject, copies):
    """`reshard_after_forward` of all ranks MUST act as True and 1 as False, or be refused."""
    scene = "even in-part" if copies == 2 else "even held-by-one"
    asked, usual = (sent_by, subject, scene, STEP, STEP), (sent_by, subject, "even", STEP)
    logs = refusal.answer_or_refusal(world, *asked, ordinary=usual)

    if logs is not None:
        whole = numel("even")
        judge_sent(logs, copies * whole, whole, scene)


WINDOWS = {
    # scene, the calls of a window, copies that are gathered and reduced in it
    "freed-each": ("freed", "backward 0, backward 1, backward 2, step", 6, 3),
    "freed-last": ("freed", "accumulate 0, accumulate 1, backward 2, step", 6, 1),
    "kept-each": ("held", "keep True, backward 0, backward 1, keep False, backward 2, step", 1, 3),
    "kept-last": (
        "held",
        "keep True, accumulate 0, accumulate 1, keep False, backward 2, step",
        1,
        1,
    ),
}


@clause(
    "fsdp.traffic.copies-per-window",
    source=f"contract: unreduced, resharding; {STAGES}; Efficient DL week 5, the bonuses",
)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_sends_as_often_as_its_settings_say(world, subject, window):
    """In a window of micro-batches, kept weights MUST NOT be gathered again, nor sums reduced."""
    word, calls, gathered, reduced = WINDOWS[window]
    logs = world.run(sent_by, subject, f"even {word}", calls, calls)

    whole = numel("even")
    judge_sent(logs, gathered * whole, reduced * whole, f"even {word}: {calls}, second window")


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
    logs = world.run(sent_by, subject, "ragged freed", STEP, STEP, STEP)

    units = len(units_of(TOYS["ragged"].build(7))) + 1  # and the root
    judge_messages(logs, units, "parameters are sent one by one")


@clause(
    "fsdp.traffic.same-on-all-ranks",
    source="contract: one-collective; pytorch issue 174862",
    worlds=(3,),
)
def test_all_ranks_issue_the_same_collectives(world, subject):
    """All ranks MUST issue the same sequence of collectives, those without rows too."""
    logs = world.run(sent_by, subject, "ragged freed", STEP, STEP, STEP)

    agreement.same_collectives(logs, given="third step")


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
                model(torch.arange(2.0 * WIDTH).view(2, WIDTH)).square().sum().backward()
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


@clause("fsdp.traffic.wait-after-reshard", source="contract: async-unshard")
def test_waiting_for_a_discarded_gather_sends_nothing(world, subject):
    """After `reshard`, waiting for a gather from before it MUST NOT gather or unshard again."""
    situation = "even: unshard in-flight, reshard, wait"
    same_as_alone(world, subject, situation, looks=("sent",), values=False)


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
