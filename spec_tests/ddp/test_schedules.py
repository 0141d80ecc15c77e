"""Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Ranks of a job run at speeds of their own, and a network completes what it likes first. Code that
takes part of that order for granted (the handle launched last is done last, the same operation is
done first on all ranks, the buffer is free by now) passes every test on one quiet machine. Here the
order is an input: the ranks are simulated (`rig.sim`), hypothesis draws who runs next, who
straggles and how late an operation admits that it is done, and shrinks what fails.
"""

from __future__ import annotations

from hypothesis import example, given

from spec_tests.clause import MUST, clause
from spec_tests.ddp.replica import Replica
from spec_tests.laws import equivalence
from spec_tests.rig import strategies
from spec_tests.rig.sim import Schedule

DDP = ("ddp", "ddp_bucketed")
SIM = ("sim",)  # live ranks take no orders
TOY, SEED = "stack", 7  # several buckets, of equal and of unequal size


def three_steps(ctx, subject, toy, seed):
    """Gradients after the third of three steps; what an early one leaves behind would show."""
    replica = Replica(ctx, subject, toy, seed)
    for micro in range(3):
        replica.zero_grad()
        replica.backward(micro)
    return replica.gradients()


@clause(
    "ddp.schedule.same-gradients",
    MUST,
    level="correct",
    judges=DDP,
    source="c10d: collectives of a group are ordered by their launch, and nothing else is ordered",
    worlds=(2, 3),
    transports=SIM,
)
@given(schedule=strategies.schedules_of_ranks())
@example(schedule=Schedule("reversed"))
@example(schedule=Schedule("seeded", seed=1, late=3))
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """The gradients MUST be the mean, whatever rank runs when and whatever completes first.

    A rank that launches by what has completed, or by what its own clock says, meets its peers with
    another bucket: sums of unrelated numbers where the sizes are equal, a deadlock where not. A
    buffer that is filled again in flight is an error by itself.
    """
    lenient = Schedule(**{**vars(schedule), "unwaited": "ignore"})
    ranks = world.scheduled(lenient).run(three_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(2,), given=str(schedule))


@clause(
    "ddp.schedule.waits-for-every-launch",
    MUST,
    level="correct",
    judges=DDP,
    source="c10d: the tensors of an asynchronous collective may be used once wait() has returned",
    worlds=(2, 3),
    transports=SIM,
)
def test_every_reduction_is_waited_for(world, subject):
    """Every reduction that is launched MUST be waited for by the rank that launched it.

    That a later one has completed proves nothing about an earlier one: gloo runs several at once.
    """
    ranks = world.run(three_steps, subject, TOY, SEED)

    equivalence.mean_gradients(ranks, TOY, SEED, micros=(2,))
