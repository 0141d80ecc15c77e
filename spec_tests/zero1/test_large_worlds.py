"""Large worlds: a step on many ranks sends what it does on two; state is one part in so many."""

from __future__ import annotations

import torch
from torch import nn

from spec_tests.clause import clauses
from spec_tests.laws import agreement, footprint, large_worlds, traffic
from spec_tests.rig.pretended import pretended
from spec_tests.zero1.runs import OPTIMIZERS, sharded, state_bytes

clause = clauses(needs=("sharded_optimizer",), level="production", worlds=(1,))
NUM_LAYERS, LAYER = 64, 16 * 16


def equal_layers():
    """A model that 64 ranks can divide evenly."""
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(NUM_LAYERS)])


def one_rank(ctx, rank, num_ranks):
    """What `rank` of `num_ranks` sends in its second step."""
    model = equal_layers()
    kind, options = OPTIMIZERS["adamw"]
    with pretended(rank, num_ranks):
        optimizer = sharded(ctx)(model.parameters(), kind, **options)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with ctx.recording() as recorder:
                optimizer.step()
    return recorder.log()


def state_of_one_rank(ctx, rank, num_ranks):
    """The bytes of its state."""
    with pretended(rank, num_ranks):
        return state_bytes(ctx, equal_layers)


@clause(
    "zero1.traffic.any-world-size",
    source="Rajbhandari et al. 2020, section 7: volume does not depend on the number of ranks",
)
@large_worlds.SIZES
def test_a_step_sends_one_copy_on_many_ranks(world, num_ranks):
    """On 8 and 64 ranks a step MUST send one copy of the parameters, and nothing else."""
    logs = [*large_worlds.first_and_last(world, num_ranks, one_rank).values()]

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
    source="Rajbhandari et al. 2020, figure 1: memory falls with the number of ranks",
)
@large_worlds.SIZES
def test_a_rank_of_many_keeps_one_part_of_the_state(world, num_ranks):
    """On 8 and 64 ranks a rank MUST keep one part in 8 or 64 of the state, and a parameter's."""
    ends = large_worlds.first_and_last(world, num_ranks, state_of_one_rank)

    footprint.at_most(
        [*ends.values()],
        {
            "share of two moments": 2 * 4 * NUM_LAYERS * LAYER // num_ranks,
            "one parameter's": 2 * 4 * LAYER,
            "counters": 8 * NUM_LAYERS,
        },
        quantity="state bytes",
        likely="parameters are dealt to a fixed number of ranks",
        given=f"{large_worlds.both(num_ranks)}, {NUM_LAYERS} equal layers",
    )
