"""Freshness: whatever happened before, a forward computes with the weights of now.

Full weights are copies, and a copy that is kept for speed can outlive what it was made of. The
loss still falls, only later and less: that is why nobody notices.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(judges=sharded.FULLY_SHARD, level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)

KEPT = "kept-after-backward"

WORDS = {"freed": "freed", "default": "", "kept-after-forward": "held"}
"""What a scene says of `reshard_after_forward`, by case."""
STEPS = "backward 0, step, backward 1, step, evaluate 9"
BY_HAND = "backward 0, unshard now, step, backward 1, unshard now, step, evaluate 9"
BETWEEN = "backward 0, step_one first, unshard now, step_one second"

test_fresh_after_step = holds(
    "fsdp.lifecycle.fresh-after-step",
    "The forward after a step MUST use the new weights, whatever was kept unsharded before it.",
    # Whoever reads version counters misses the foreach and fused updates, which move none.
    {case: f"even {word}: {STEPS}" for case, word in WORDS.items()}
    | {
        KEPT: f"even: keep True, {STEPS}",
        f"{KEPT}-foreach": f"even foreach: keep True, {STEPS}",
        f"{KEPT}-fused": f"even fused: keep True, {STEPS}",
        "by-hand": f"even: {BY_HAND}",
        "by-hand-between-two": f"even two-foreach: keep True, {BETWEEN}, evaluate 9",
    },
    source="contract: fresh-weights, by-hand",
)

test_fresh_after_gather_in_flight = holds(
    "fsdp.lifecycle.fresh-after-gather-in-flight",
    "What was gathered before a step MUST NOT be computed with after it, waited for or not.",
    {"in-flight": f"even: {BY_HAND.replace('now', 'in-flight')}"},
    level="production",
    source="contract: fresh-weights, async-unshard; FSDPModule.unshard(async_op=True)",
    worlds=(2,),
)

test_fresh_after_evaluation = holds(
    "fsdp.lifecycle.fresh-after-evaluation",
    "After backward, evaluation, step: the next forward MUST use the new weights.",
    {c: f"even {w}: backward 0, evaluate 1, step, evaluate 9" for c, w in WORDS.items()},
    source="contract: fresh-weights",
    worlds=(2,),
)

WRITES = {
    # what happens before the full weights come to be, and how the shards change then
    "loaded": ("save, step, ", "load copied"),
    "assigned": ("save, step, ", "load assigned"),
    "assigned-in-parts": ("save, step, ", "load in-parts"),
    "loaded-while-unsharded": ("save, step, ", "unshard now, load copied"),
    "written-parameter": ("", "write parameters"),
    "written-local-tensor": ("", "write local-tensors"),
    "written-second-of-a-unit": ("", "write one-parameter"),
}
FULL = {case: (word, "evaluate 0") for case, word in WORDS.items()} | {
    KEPT: ("", "keep True, backward 0")
}

test_fresh_after_load = holds(
    "fsdp.lifecycle.fresh-after-load",
    "The forward after weights were loaded or written in place MUST use them.",
    {
        f"{kept}-{how}": f"even {word}: {before}{full}, {change}, evaluate 9"
        for kept, (word, full) in FULL.items()
        for how, (before, change) in WRITES.items()
    },
    source="contract: fresh-weights, state-dict",
    worlds=(2,),
)


def full_of_unsharded(ctx, subject, update):
    """Full parameters of what was unsharded by hand and then updated."""
    rank = sharded.on_rank(ctx, subject, "stack")
    rank.follow(f"backward 0, unshard now, {update}")
    return sharded.full_parameters(ctx, rank.wrapped, rank.names)


@clause(
    "fsdp.lifecycle.full-parameters-of-what-is-unsharded",
    level="production",
    source="contract: full_parameters/current; "
    "a copy that is registered is that of before the update",
    worlds=(2,),
)
@pytest.mark.parametrize("update", ["step", "write local-tensors"], ids=["step", "write"])
def test_full_parameters_of_what_is_unsharded_are_the_current_ones(world, subject, update):
    """After an update of what was unsharded by hand, full parameters MUST be the new ones."""
    found = world.run(full_of_unsharded, subject, update)

    built = oracle.parameters("stack", sharded.SEED)
    new = {name: -value for name, value in built.items()}  # updates of programs turn the sign
    stale = Hint("the value before the update: what was unsharded is returned", built)
    judge.tensors(found, new, quantity="full parameter", hints=[stale])
