"""Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Buckets leave while the backward still fills others, so which of them is done first differs from
rank to rank and from step to step. The order is an input here (`laws.schedules`).
"""

from __future__ import annotations

from spec_tests.clause import clauses
from spec_tests.ddp.replica import Replica
from spec_tests.laws import equivalence, schedules

clause = clauses(
    judges=("ddp", "ddp_bucketed"), level="correct", worlds=(2, 3), transports=schedules.SIM
)
TOY, SEED = "stack", 7  # several buckets, of equal and of unequal size


def three_steps(ctx, subject, toy, seed):
    """Gradients after the third of three steps; what an early one leaves behind would show."""
    replica = Replica(ctx, subject, toy, seed)
    for micro in range(3):
        replica.zero_grad()
        replica.backward(micro)
    return replica.gradients()


@clause("ddp.schedule.same-gradients", source=schedules.LAUNCH_ORDER)
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """The gradients MUST be the mean, whatever rank runs when and whatever completes first.

    A rank that launches by what has completed, or by what its own clock says, meets its peers with
    another bucket: sums of unrelated numbers where the sizes are equal, a deadlock where not. A
    buffer that is filled again in flight is an error by itself.
    """
    ranks = schedules.run(world, schedule, three_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(2,), given=str(schedule))


@clause("ddp.schedule.waits-for-every-launch", source=schedules.WAITED_FOR)
def test_every_reduction_is_waited_for(world, subject):
    """Every reduction that is launched MUST be waited for by the rank that launched it.

    That a later one has completed proves nothing about an earlier one: gloo runs several at once.
    """
    ranks = world.run(three_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(2,))
