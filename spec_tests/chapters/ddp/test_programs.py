"""Programs: any situation of training on replicas, in any order of events.

Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Buckets leave while the backward still fills others, so which of them is done first differs from
rank to rank and from step to step. The order is an input here (`laws.schedules`).
"""

from __future__ import annotations

from functools import partial

from spec_tests.programs import draw
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import schedules
from spec_tests.programs.scene import REPLICAS
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=REPLICAS, level="correct", worlds=(2, 3))
drawn = rows(clause, partial(draw.judge_part, level="correct"))
drawn_of_production = rows(clause, partial(draw.judge_part, level="production", looks=True))
SITUATIONS = (
    "contract: mean-gradient, since-zero-grad, no_sync/local-sums; "
    "Cohen et al. 1997, The AETG system"
)

test_any_situation = drawn(
    "ddp.programs.any-situation",
    "In any scene any legal program MUST do on replicas what it does in one process.",
    # Scenes in which every two words meet, in each a program of up to 24 calls, and the situations
    # of `spec_tests/programs/seeds.toml`, which once told a fault.
    range(draw.PARTS),
    source=SITUATIONS,
)

test_any_production_situation = drawn_of_production(
    "ddp.programs.any-production-situation",
    "With all that DDP offers, any legal program MUST do on replicas what it does in one process.",
    # An ordinary step then sends what it sent before the program. Parameters and gradients keep
    # their dtype, shape and placements.
    range(draw.PARTS),
    level="production",
    source=SITUATIONS,
    worlds=(2,),
)


# Several buckets, of equal and of unequal size; what an early step leaves would show in the third.
THREE_STEPS = "backward 0, zero_grad none, backward 1, zero_grad none, backward 2"


@clause(
    "ddp.schedule.same-gradients",
    source="contract: mean-gradient; " + schedules.LAUNCH_ORDER,
    transports=schedules.SIM,
)
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """The gradients MUST be the mean, whatever rank runs when and whatever completes first.

    A rank that launches by what has completed, or by what its own clock says, meets its peers with
    another bucket: sums of unrelated numbers where the sizes are equal, a deadlock where not. A
    buffer that is filled again in flight is an error by itself.
    """
    same_as_alone(schedules.under(world, schedule), subject, THREE_STEPS, given=str(schedule))


@clause(
    "ddp.schedule.waits-for-every-launch",
    source="contract: waits; " + schedules.WAITED_FOR,
    transports=schedules.SIM,
)
def test_every_reduction_is_waited_for(world, subject):
    """Every reduction that is launched MUST be waited for by the rank that launched it.

    That a later one has completed proves nothing about an earlier one: gloo runs several at once.
    """
    same_as_alone(schedules.strict(world), subject, THREE_STEPS)
