"""Programs: any situation of a sharded optimizer, in any order of events.

Schedules: in whichever order ranks run and operations complete, the weights are the same.

Each rank sends what it owns and takes what the others own, in as many messages as there are owners
or parameters. Who overlaps them relies on what has arrived; here arrival is an input
(`laws.schedules`).
"""

from __future__ import annotations

from functools import partial

from spec_tests.chapters.zero1.runs import TOY, steps
from spec_tests.programs import draw
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import schedules
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=("sharded_optimizer",), level="correct")
holds = rows(clause, same_as_alone)
drawn = rows(clause, partial(draw.judge_part, level="correct"))
FULL_STATE = ("full_optimizer_state",)

test_any_situation = drawn(
    "zero1.programs.any-situation",
    "In any scene any legal program MUST give the weights of the plain optimizer.",
    # Scenes in which every two words meet, in each a program of up to 24 calls, and the situations
    # of `spec_tests/programs/seeds.toml`, which once told a fault.
    range(draw.PARTS),
    source="contract: same-values, frozen; Cohen et al. 1997, The AETG system",
    worlds=(2, 3),
)

test_load_replaces = holds(
    "zero1.state.load-replaces",
    "A load MUST replace the whole state: entries missing from the loaded state are gone.",
    {
        "empty": "even momentum: save, deal 0 all, update, load copied, deal 1 all, update",
        "in-part": "even momentum: deal 0 half, update, save, deal 1 all, update, load copied, "
        "deal 2 all, update",
    },
    needs=FULL_STATE,
    source="contract: load-replaces; torch.optim.Optimizer.load_state_dict",
)


@clause(
    "zero1.schedule.same-weights",
    source="contract: same-values; " + schedules.LAUNCH_ORDER,
    worlds=(3,),
    needs=(),
    transports=schedules.SIM,
)
@schedules.drawn
def test_no_order_of_events_changes_the_weights(world, subject, schedule):
    """All ranks MUST hold the unsharded weights, whatever rank runs when and what completes first.

    A buffer that is filled again in flight, or read before its message is in, is right as long as
    the wire is faster than the loop over parameters.
    """
    line = f"{TOY} momentum: {steps(1, 2)}"
    same_as_alone(schedules.under(world, schedule), subject, line, given=str(schedule))


@clause(
    "zero1.schedule.waits-for-every-launch",
    source="contract: waits; " + schedules.WAITED_FOR,
    worlds=(2, 3),
    needs=(),
    transports=schedules.SIM,
)
def test_every_exchange_is_waited_for(world, subject):
    """Every exchange that is launched MUST be waited for by the rank that launched it."""
    same_as_alone(schedules.strict(world), subject, f"ragged momentum: {steps(1, 2)}")
