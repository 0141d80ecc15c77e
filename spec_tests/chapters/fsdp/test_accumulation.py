"""Accumulation: several micro-batches per step, reduced when asked for.

Gradients that wait for their reduction live outside of `.grad`: whole, on every rank, in a place
that an optimizer does not know. So `zero_grad` may miss them, freeing the weights may take them
along, and the micro-batch that reduces may not use every unit that has something waiting.
"""

from __future__ import annotations

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD
from spec_tests.programs.law import same_as_alone
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=FULLY_SHARD, level="correct")
holds = rows(clause, same_as_alone)

PAGE = "FSDPModule.set_requires_gradient_sync, set_reshard_after_backward"
WINDOWS = {
    "last": ("accumulate 0, accumulate 1", "backward 2"),
    "each": ("backward 0, backward 1", "backward 2"),
    "mixed": ("backward 0, accumulate 1", "backward 2"),
    "again": ("accumulate 5, backward 6, zero_grad none, backward 0, accumulate 1", "backward 2"),
}

test_any_schedule = holds(
    "fsdp.accumulation.any-schedule",
    "Whichever micro-batches are reduced, freed or kept, the gradient MUST be that of them all.",
    {
        f"freed-{window}": f"stack nested freed: {first}, {last}"
        for window, (first, last) in WINDOWS.items()
    }
    | {
        f"kept-{window}": f"stack nested held: keep True, {first}, keep False, {last}"
        for window, (first, last) in WINDOWS.items()
    },
    source="contract: unreduced, resharding; "
    f"{PAGE}; Efficient DL week 5, the two bonuses on accumulation",
    worlds=(2, 3),
)

test_sends_no_gradient = holds(
    "fsdp.accumulation.sends-no-gradient",
    "With gradient synchronisation off, a backward MUST NOT reduce anything.",
    # The numbers are right either way: only a look at the traffic tells.
    "even: backward 5, zero_grad none, accumulate 0, accumulate 1",
    looks=("silent",),
    values=False,
    source="contract: unreduced; " + PAGE,
)

test_cleared_before_backward = holds(
    "fsdp.accumulation.cleared-before-backward",
    "`zero_grad` of the model between forward and backward MUST clear the gradients of shards.",
    "stack nested: backward 5, forward 0, zero_grad of-the-model, pending",
    level="production",
    source="contract: clears-between; "
    "loss = model(x); model.zero_grad(); loss.backward(): between, a unit may be unsharded",
)

test_after_an_interrupted_backward = holds(
    "fsdp.accumulation.after-an-interrupted-backward",
    "After a backward that raised and the model's `zero_grad`, gradients MUST be the next one's.",
    # Also where its forward had come before the exception.
    {
        then: f"stack nested: backward 5, {failing}, zero_grad of-the-model, {last}"
        for then, failing, last in (
            ("step", "fails_backward 3 first", "backward 0"),
            ("pending", "forward 0, fails_backward 3 first", "resumed"),
        )
    },
    level="production",
    source="contract: clears-after-error, backward-after-clear; "
    "a caught exception leaves units unsharded: zero_grad of the model misses their shards",
)

DISCARDED = {
    "all": "stack",
    "fewer-rows-than-ranks": "ragged",
    "not-used-in-the-last": "branches-in-turn layers",
}
CLEARED = {"to-none": ("", "none"), "to-zero": ("", "zero"), "to-zero-at-once": ("foreach", "zero")}

test_zero_grad_discards = holds(
    "fsdp.accumulation.zero-grad-discards",
    "`zero_grad` between micro-batches MUST discard unreduced gradients as it discards `.grad`.",
    # Otherwise a step that was skipped, for an overflow say, comes back with the next one. What
    # foreach and fused optimizers write to DTensors moves no version counter.
    {
        f"{case}-{cleared}": f"{scene} {word}: backward 4, zero_grad {how}, accumulate 0, "
        f"zero_grad {how}, backward 1"
        for case, scene in DISCARDED.items()
        for cleared, (word, how) in CLEARED.items()
    },
    source="contract: zero-grad; as ddp does",
)
