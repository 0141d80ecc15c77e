"""Programs: any situation of training on shards, in any order of events.

Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Gathers run ahead of the computation and reductions behind it, so several are in flight at any time
and buffers go from one to the next. Whether each is waited for before its buffer is touched shows
where completion is an input (`laws.schedules`).
"""

from __future__ import annotations

from functools import partial

from spec_tests.chapters.fsdp.sharded import BOTH, FULLY_SHARD
from spec_tests.programs import draw
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import schedules
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=FULLY_SHARD, level="correct")
holds = rows(clause, same_as_alone)
drawn = rows(clause, partial(draw.judge_part, level="correct"))
drawn_of_production = rows(clause, partial(draw.judge_part, level="production", looks=True))

TWO_STEPS_OF_PAIRS = (
    "backward 0, step, accumulate 1, backward 2, step, backward 3",
    "keep True, backward 0, step, accumulate 1, backward 2, step, backward 3",
)
pairs = rows(clause, partial(draw.judge_rows, level="correct", texts=TWO_STEPS_OF_PAIRS))
SITUATIONS = "contract: mean-gradient, fresh-weights; Cohen et al. 1997, The AETG system"

test_any_situation = drawn(
    "fsdp.programs.any-situation",
    "In any scene any legal program MUST do on shards what it does in one process.",
    # Scenes in which every two words meet, in each a program of up to 24 calls, and the situations
    # of `spec_tests/programs/seeds.toml`, which once told a fault.
    range(draw.PARTS),
    judges=BOTH,
    source=SITUATIONS,
    worlds=(2, 3, 4),
)

test_any_production_situation = drawn_of_production(
    "fsdp.programs.any-production-situation",
    "With all that FSDP2 offers, any legal program MUST do on shards what it does in one process.",
    # No call sends more than it may. An ordinary step then sends and keeps what it did before the
    # program. Parameters and gradients keep their dtype, shape and placements.
    range(draw.PARTS),
    judges=BOTH,
    level="production",
    source=SITUATIONS,
    worlds=(2, 4),
)

test_fresh_after_exception = holds(
    "fsdp.lifecycle.fresh-after-exception",
    "After an exception in forward was caught and a step taken, a forward MUST see new weights.",
    # What the interrupted forward had gathered has no end of forward that would free it.
    {"last": "mlp freed: backward 0, fails 1 last, step, evaluate 2"},
    source="contract: fresh-weights, after-exception",
)

test_pairs_of_settings = pairs(
    "fsdp.programs.pairs-of-settings",
    "Whatever two settings meet on four ranks, two steps MUST use mean gradients and new weights.",
    # Settings that two ranks can have meet in the drawn situations.
    range(draw.PARTS),
    needs=("MixedPrecisionPolicy",),
    level="production",
    source="contract: mean-gradient, fresh-weights; Cohen et al. 1997, The AETG system",
    worlds=(4,),
)


# What an early step leaves behind would show in the second.
TWO_STEPS = "stack: backward 0, zero_grad none, backward 1"


@clause(
    "fsdp.schedule.same-gradients",
    source="contract: mean-gradient; " + schedules.LAUNCH_ORDER,
    worlds=(3,),
    transports=schedules.SIM,
)
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """Whatever schedule the ranks of a sharded model run by, its gradients MUST be the mean."""
    same_as_alone(schedules.under(world, schedule), subject, TWO_STEPS, given=str(schedule))


@clause(
    "fsdp.schedule.waits-for-every-launch",
    source="contract: waits; " + schedules.WAITED_FOR,
    worlds=(2, 3),
    transports=schedules.SIM,
)
def test_every_gather_and_every_reduction_is_waited_for(world, subject):
    """Every collective that is launched MUST be waited for by the rank that launched it.

    Also a gather that was launched ahead and then not needed: its buffer may be freed in flight.
    """
    same_as_alone(schedules.strict(world), subject, TWO_STEPS)
