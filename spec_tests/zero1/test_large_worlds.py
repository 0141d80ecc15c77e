"""Large worlds: a step on many ranks sends what it does on two; state is one part in so many."""

from __future__ import annotations

import torch
from torch import nn

from spec_tests.clause import MUST, clause
from spec_tests.laws import agreement, footprint, large_worlds, traffic
from spec_tests.rig.pretended import pretended
from spec_tests.zero1.runs import OPTIMIZERS, sharded

ZERO = ("sharded_optimizer",)
NUM_LAYERS, LAYER = 64, 16 * 16


def one_rank(ctx, rank, num_ranks):
    """What `rank` of `num_ranks` sends in its second step, and the bytes of its state."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(NUM_LAYERS)])
    kind, options = OPTIMIZERS["adamw"]
    with pretended(rank, num_ranks):
        optimizer = sharded(ctx)(model.parameters(), kind, **options)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with ctx.recording() as recorder:
                optimizer.step()
        log = recorder.log()
    kept = [t for entry in optimizer.state.values() for t in entry.values()]
    return log, sum(t.nbytes for t in kept if isinstance(t, torch.Tensor) and t.dim())


@clause(
    "zero1.traffic.any-world-size",
    MUST,
    level="production",
    needs=ZERO,
    source="Rajbhandari et al. 2020, section 7: volume does not depend on the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_a_step_sends_one_copy_on_many_ranks(world, num_ranks):
    """On 8 and 64 ranks a step MUST send one copy of the parameters, and nothing else."""
    ends = large_worlds.first_and_last(world, num_ranks, one_rank)

    logs = [log for log, _ in ends.values()]
    # Lengths that the ranks divide, beginnings on cache lines.
    traffic.sent_once(
        logs,
        numel=NUM_LAYERS * LAYER,
        padding=NUM_LAYERS * 16,
        given=large_worlds.both(num_ranks),
    )
    agreement.same_collectives(logs, given=large_worlds.both(num_ranks))


@clause(
    "zero1.footprint.any-world-size",
    MUST,
    level="production",
    needs=ZERO,
    source="Rajbhandari et al. 2020, figure 1: memory falls with the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_a_rank_of_many_keeps_one_part_of_the_state(world, num_ranks):
    """On 8 and 64 ranks a rank MUST keep one part in 8 or 64 of the state, and a parameter's."""
    ends = large_worlds.first_and_last(world, num_ranks, one_rank)

    footprint.at_most(
        [kept for _, kept in ends.values()],
        {
            "share of two moments": 2 * 4 * NUM_LAYERS * LAYER // num_ranks,
            "one parameter's": 2 * 4 * LAYER,
        },
        quantity="state bytes",
        likely="parameters are dealt to a fixed number of ranks",
        given=f"{large_worlds.both(num_ranks)}, {NUM_LAYERS} equal layers",
    )
