"""Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Buckets leave while the backward still fills others, so which of them is done first differs from
rank to rank and from step to step. The order is an input here (`laws.schedules`).
"""

from __future__ import annotations

from spec_tests.clause import clauses
from spec_tests.ddp.replica import DDP, mean_gradients
from spec_tests.laws import schedules

clause = clauses(judges=DDP, level="correct", worlds=(2, 3), transports=schedules.SIM)
TOY = "stack"  # several buckets, of equal and of unequal size
# What an early step leaves behind would show in the third.
THREE_STEPS = "backward 0, zero_grad, backward 1, zero_grad, backward 2"


@clause("ddp.schedule.same-gradients", source=schedules.LAUNCH_ORDER)
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """The gradients MUST be the mean, whatever rank runs when and whatever completes first.

    A rank that launches by what has completed, or by what its own clock says, meets its peers with
    another bucket: sums of unrelated numbers where the sizes are equal, a deadlock where not. A
    buffer that is filled again in flight is an error by itself.
    """
    scheduled = schedules.under(world, schedule)
    mean_gradients(scheduled, subject, TOY, THREE_STEPS, given=str(schedule))


@clause("ddp.schedule.waits-for-every-launch", source=schedules.WAITED_FOR)
def test_every_reduction_is_waited_for(world, subject):
    """Every reduction that is launched MUST be waited for by the rank that launched it.

    That a later one has completed proves nothing about an earlier one: gloo runs several at once.
    """
    mean_gradients(world, subject, TOY, THREE_STEPS)
