"""Schedules: in whichever order ranks run and operations complete, the weights are the same.

Each rank sends what it owns and takes what the others own, in as many messages as there are owners
or parameters. Who overlaps them relies on what has arrived; here arrival is an input
(`laws.schedules`).
"""

from __future__ import annotations

from spec_tests.clause import clauses
from spec_tests.laws import schedules
from spec_tests.zero1.runs import same_as_unsharded

clause = clauses(needs=("sharded_optimizer",), level="correct", transports=schedules.SIM)


def two_steps(run):
    """Weights after each of two steps."""
    return run.steps(1, 2)


@clause("zero1.schedule.same-weights", source=schedules.LAUNCH_ORDER, worlds=(3,))
@schedules.drawn
def test_no_order_of_events_changes_the_weights(world, schedule):
    """All ranks MUST hold the unsharded weights, whatever rank runs when and what completes first.

    A buffer that is filled again in flight, or read before its message is in, is right as long as
    the wire is faster than the loop over parameters.
    """
    same_as_unsharded(schedules.under(world, schedule), two_steps, optimizer="momentum")


@clause("zero1.schedule.waits-for-every-launch", source=schedules.WAITED_FOR, worlds=(2, 3))
def test_every_exchange_is_waited_for(world):
    """Every exchange that is launched MUST be waited for by the rank that launched it."""
    same_as_unsharded(world, two_steps, optimizer="momentum")
