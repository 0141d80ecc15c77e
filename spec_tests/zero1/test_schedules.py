"""Schedules: in whichever order ranks run and operations complete, the weights are the same.

Each rank sends what it owns and takes what the others own, in as many messages as there are owners
or parameters. Who overlaps them relies on what has arrived; here arrival is an input (`rig.sim`).
"""

from __future__ import annotations

from hypothesis import example, given

from spec_tests.clause import MUST, clause
from spec_tests.rig import strategies
from spec_tests.rig.sim import Schedule
from spec_tests.zero1.runs import in_ranks, like_unsharded

ZERO = ("sharded_optimizer",)
SIM = ("sim",)  # live ranks take no orders


def two_steps(run):
    """Weights after each of two steps."""
    return run.steps(1, 2)


@clause(
    "zero1.schedule.same-weights",
    MUST,
    level="correct",
    needs=ZERO,
    source="c10d: collectives of a group are ordered by their launch, and nothing else is ordered",
    worlds=(3,),
    transports=SIM,
)
@given(schedule=strategies.schedules_of_ranks())
@example(schedule=Schedule("reversed"))
@example(schedule=Schedule("seeded", seed=1, late=3))
def test_no_order_of_events_changes_the_weights(world, schedule):
    """All ranks MUST hold the unsharded weights, whatever rank runs when and what completes first.

    A buffer that is filled again in flight, or read before its message is in, is right as long as
    the wire is faster than the loop over parameters.
    """
    lenient = Schedule(**{**vars(schedule), "unwaited": "ignore"})
    ranks = world.scheduled(lenient).run(in_ranks, two_steps, optimizer="momentum")

    like_unsharded(ranks, two_steps, optimizer="momentum")


@clause(
    "zero1.schedule.waits-for-every-launch",
    MUST,
    level="correct",
    needs=ZERO,
    source="c10d: the tensors of an asynchronous collective may be used once wait() has returned",
    worlds=(2, 3),
    transports=SIM,
)
def test_every_exchange_is_waited_for(world):
    """Every exchange that is launched MUST be waited for by the rank that launched it."""
    ranks = world.run(in_ranks, two_steps, optimizer="momentum")

    like_unsharded(ranks, two_steps, optimizer="momentum")
