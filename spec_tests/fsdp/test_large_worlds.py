"""Large worlds: a pass on many ranks gathers what it does on two, and shards are as many parts."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, shard
from spec_tests.laws import agreement, footprint, large_worlds, traffic
from spec_tests.rig import judge
from spec_tests.rig.pretended import pretended

clause = clauses(judges=FULLY_SHARD, level="production", worlds=(1,))

WIDTH, DEPTH = 64, 4
UNIT = WIDTH * WIDTH
"""Elements of a layer: 64 ranks keep a row of it each."""


def one_rank(ctx, subject, rank, num_ranks):
    """What `rank` of `num_ranks` sends in its second step, pass by pass, and keeps after it."""
    seen: dict[str, Any] = {}
    with pretended(rank, num_ranks), ctx.recording() as life:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
        model = shard(ctx, subject, nn.Sequential(*layers), reshard_after_forward=True)
        del layers
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for _ in range(2):
            with ctx.recording() as recorder:
                loss = model(torch.ones(2, WIDTH)).sum()
            seen["forward"] = recorder.log()
            with ctx.recording() as recorder:
                loss.backward()
            seen["backward"] = recorder.log()
            with ctx.recording() as recorder:
                optimizer.step()
            seen["update"] = recorder.log()
            optimizer.zero_grad()
        del loss
        gc.collect()
        seen["bytes"] = life.live_bytes
    return seen


@clause(
    "fsdp.traffic.any-world-size",
    source="Rajbhandari et al. 2020, section 7: volume does not depend on the number of ranks",
)
@large_worlds.SIZES
def test_a_step_sends_no_more_on_many_ranks(world, subject, num_ranks):
    """On 8 and 64 ranks a step MUST send what it sends on two: per pass one copy of the model."""
    ends = large_worlds.first_and_last(world, num_ranks, one_rank, subject)

    whole = DEPTH * UNIT
    for end, seen in ends.items():
        got = (
            traffic.gathered(seen["forward"], num_ranks),
            traffic.gathered(seen["backward"], num_ranks),
            traffic.reduced(seen["backward"]),
            traffic.volume(seen["update"]),
        )
        judge.holds(
            got == (whole, whole, whole, 0),
            f"{end} rank of {num_ranks}: expected {whole} elements gathered in forward, as many "
            f"gathered and reduced in backward, and none in the update, got {got}",
            likely="rows are padded to a multiple, or something is sent by each rank",
        )
    for phase in ("forward", "backward", "update"):
        logs = [seen[phase] for seen in ends.values()]
        agreement.same_collectives(logs, given=f"{phase}, {large_worlds.both(num_ranks)}")


@clause(
    "fsdp.footprint.any-world-size",
    source="Rajbhandari et al. 2020, figure 1: memory falls with the number of ranks",
)
@large_worlds.SIZES
def test_what_stays_is_one_part_in_so_many_ranks(world, subject, num_ranks):
    """Between steps a rank of 8 or 64 MUST hold one part in 8 or 64 of weights and moments."""
    ends = large_worlds.first_and_last(world, num_ranks, one_rank, subject)

    shards = 4 * DEPTH * UNIT // num_ranks
    footprint.at_most(
        [seen["bytes"] for seen in ends.values()],
        {"shards": shards, "moments": 2 * shards, "counters and inputs": 512 * DEPTH},
        quantity="bytes after a step",
        likely="rows are padded to a multiple, or ranks beyond a number share nothing",
        given=f"{large_worlds.both(num_ranks)}, {DEPTH} layers of {4 * UNIT} bytes",
    )
