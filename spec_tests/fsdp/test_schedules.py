"""Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Gathers run ahead of the computation and reductions behind it, so several are in flight at any time
and buffers go from one to the next. Whether each is waited for before its buffer is touched shows
where completion is an input (`laws.schedules`).
"""

from __future__ import annotations

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded
from spec_tests.laws import equivalence, schedules

clause = clauses(judges=FULLY_SHARD, level="correct", transports=schedules.SIM)

TOY, SEED = "stack", 7


def two_steps(ctx, subject, toy, seed):
    """Gradients after the second of two steps; what an early one leaves behind would show."""
    sharded = Sharded(ctx, subject, toy, seed)
    for micro in range(2):
        sharded.optimizer.zero_grad()
        sharded.backward(micro)
    return sharded.whole_gradients()


@clause("fsdp.schedule.same-gradients", source=schedules.LAUNCH_ORDER, worlds=(3,))
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """Whatever schedule the ranks of a sharded model run by, its gradients MUST be the mean."""
    ranks = schedules.run(world, schedule, two_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(1,), given=str(schedule))


@clause("fsdp.schedule.waits-for-every-launch", source=schedules.WAITED_FOR, worlds=(2, 3))
def test_every_gather_and_every_reduction_is_waited_for(world, subject):
    """Every collective that is launched MUST be waited for by the rank that launched it.

    Also a gather that was launched ahead and then not needed: its buffer may be freed in flight.
    """
    ranks = world.run(two_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(1,))
