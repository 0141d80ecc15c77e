"""Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Gathers run ahead of the computation and reductions behind it, so several are in flight at any time
and buffers go from one to the next. Whether each is waited for before its buffer is touched shows
where completion is an input (`laws.schedules`).
"""

from __future__ import annotations

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, mean_gradients
from spec_tests.laws import schedules

clause = clauses(judges=FULLY_SHARD, level="correct", transports=schedules.SIM)

TOY = "stack"
# What an early step leaves behind would show in the second.
TWO_STEPS = "backward 0, zero_grad, backward 1, gather"


@clause("fsdp.schedule.same-gradients", source=schedules.LAUNCH_ORDER, worlds=(3,))
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """Whatever schedule the ranks of a sharded model run by, its gradients MUST be the mean."""
    scheduled = schedules.under(world, schedule)
    mean_gradients(scheduled, subject, TOY, TWO_STEPS, absent_is_zero=False, given=str(schedule))


@clause("fsdp.schedule.waits-for-every-launch", source=schedules.WAITED_FOR, worlds=(2, 3))
def test_every_gather_and_every_reduction_is_waited_for(world, subject):
    """Every collective that is launched MUST be waited for by the rank that launched it.

    Also a gather that was launched ahead and then not needed: its buffer may be freed in flight.
    """
    mean_gradients(world, subject, TOY, TWO_STEPS, absent_is_zero=False)
