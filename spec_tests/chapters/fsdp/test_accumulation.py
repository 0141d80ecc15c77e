"""Accumulation: several micro-batches per step, reduced when asked for.

Gradients that wait for their reduction live outside of `.grad`: whole, on every rank, in a place
that an optimizer does not know. So `zero_grad` may miss them, freeing the weights may take them
along, and the micro-batch that reduces may not use every unit that has something waiting.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    Sharded,
    divisible,
    gradients_sent,
    mean_gradients,
)
from spec_tests.programs.laws import equivalence, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(judges=FULLY_SHARD, level="correct")

PAGE = "FSDPModule.set_requires_gradient_sync, set_reshard_after_backward"
WINDOWS = {
    "last": ("accumulate 0", "accumulate 1", "backward 2"),
    "each": ("backward 0", "backward 1", "backward 2"),
    "mixed": ("backward 0", "accumulate 1", "backward 2"),
    "again": ("accumulate 5, backward 6, zero_grad, backward 0", "accumulate 1", "backward 2"),
}
EVALUATED = {
    "fully_shard": "accumulate 0, evaluate 7, backward 1, evaluate 8",
    "fsdp": "backward 0, evaluate 7, backward 1, evaluate 8",
}
UNUSED_IN_LAST = {
    "fully_shard": "accumulate 0 use=abc, backward 1 use=ab",
    "fsdp": "unfinished 0 use=abc, unfinished 1 use=ab, finish",
}
ORDINARY = "backward 0, evaluate 7"


@clause(
    "fsdp.accumulation.any-schedule",
    source="contract: unreduced, resharding; "
    f"{PAGE}; Efficient DL week 5, the two bonuses on accumulation",
    worlds=(2, 3),
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_any_schedule_of_reductions_gives_the_same_gradient(world, subject, window, keeps):
    """Whichever micro-batches are reduced, freed or kept, the gradient MUST be that of them all."""
    first, second, last = WINDOWS[window]
    calls = f"keep {keeps}, {first}, {second}, keep False, {last}"
    mean_gradients(world, subject, "stack", calls, units="nested", reshard_after_forward=not keeps)


def silent_window(ctx, subject):
    """How many elements two micro-batches that are not to be reduced reduce."""
    sharded = Sharded(ctx, subject, "even")
    sharded.follow("backward 5, zero_grad")
    with ctx.recording() as recorder:
        sharded.follow("accumulate 0, accumulate 1")
    return gradients_sent(recorder.log(), "even")


@clause("fsdp.accumulation.sends-no-gradient", source="contract: unreduced; " + PAGE)
def test_a_micro_batch_that_is_not_reduced_sends_no_gradient(world, subject):
    """With gradient synchronisation off, a backward MUST NOT reduce anything.

    The numbers are right either way: only a look at the traffic tells.
    """
    ranks = world.run(silent_window, subject)

    judge.equal(ranks, 0, quantity="elements reduced in two micro-batches")


def cleared_before_backward(ctx, subject):
    """Gradients of a backward before which the model's were cleared, after its forward."""
    sharded = Sharded(ctx, subject, "stack", units="nested")
    sharded.follow("backward 5")
    loss = sharded.loss(0)
    sharded.wrapped.zero_grad()
    loss.backward()
    return sharded.gradients()


@clause(
    "fsdp.accumulation.cleared-before-backward",
    level="production",
    source="contract: clears-between; "
    "loss = model(x); model.zero_grad(); loss.backward(): between, a unit may be unsharded",
)
def test_zero_grad_between_forward_and_backward_clears(world, subject):
    """`zero_grad` of the model between forward and backward MUST clear the gradients of shards."""
    ranks = world.run(cleared_before_backward, subject)

    equivalence.mean_gradients(ranks, "stack", SEED, micros=(0,))


def after_an_interrupted_backward(ctx, subject, then):
    """Gradients of what follows a backward that raised on all ranks, the model's being cleared."""
    sharded = Sharded(ctx, subject, "stack", units="nested")
    sharded.follow("backward 5")
    failing = sharded.interrupted("blocks.0.down", 3)
    pending = sharded.loss(0) if then == "pending" else None
    with pytest.raises(AttributeError):
        failing.backward()
    sharded.wrapped.zero_grad()
    loss = sharded.loss(0) if pending is None else pending
    loss.backward()
    return sharded.gradients()


@clause(
    "fsdp.accumulation.after-an-interrupted-backward",
    level="production",
    source="contract: clears-after-error, backward-after-clear; "
    "a caught exception leaves units unsharded: zero_grad of the model misses their shards",
)
@pytest.mark.parametrize("then", ["step", "pending"])
def test_a_backward_that_was_interrupted_leaves_no_gradient(world, subject, then):
    """After a backward that raised and the model's `zero_grad`, gradients MUST be the next one's.

    Also where its forward had come before the exception.
    """
    ranks = refusal.answer_or_refusal(world, after_an_interrupted_backward, subject, then)

    if ranks is not None:
        equivalence.mean_gradients(ranks, "stack", SEED, micros=(0,), absent_is_zero=True)


DISCARDED = {
    # the toy, its units, and how the cleared micro-batches and the last one call it
    "all": ("stack", "children", "", ""),
    "fewer-rows-than-ranks": ("ragged", "children", "", ""),
    "not-used-in-the-last": ("branches", "layers", " use=abc", " use=ab"),
}


@clause("fsdp.accumulation.zero-grad-discards", source="contract: zero-grad; as ddp does")
@pytest.mark.parametrize("how", ["to-none", "to-zero", "to-zero-at-once"])
@pytest.mark.parametrize("case", DISCARDED)
def test_zero_grad_inside_a_window_discards_what_was_pending(world, subject, case, how):
    """`zero_grad` between micro-batches MUST discard unreduced gradients as it discards `.grad`.

    Otherwise a step that was skipped, for an overflow say, comes back with the next one. What
    foreach and fused optimizers write to DTensors moves no version counter.
    """
    clear = f"zero_grad {how == 'to-none'}"
    toy, units, every, last = DISCARDED[case]
    calls = "foreach, " if how == "to-zero-at-once" else ""
    calls += f"backward 5{every}, {clear}, accumulate 0{every}, {clear}, backward 1{last}"
    hints = []
    if not last:
        ranks, micros = range(world.size), (0, 1)
        both = equivalence.full_batch_gradients(toy, SEED, ranks=ranks, micros=micros)
        hints = [Hint("the discarded micro-batch is still in it: a hidden accumulator", both)]
    mean_gradients(world, subject, toy, calls, hints=hints, units=units)


@clause(
    "fsdp.accumulation.unused-in-last",
    judges=BOTH,
    source="contract: unused-none, adds-up, unused; "
    "pytorch issue 69031, on DistributedDataParallel",
    worlds=(2, 3),
)
def test_a_unit_used_only_in_an_early_micro_batch_is_reduced(world, subject):
    """A unit used only before the reducing micro-batch MUST be reduced, or be an error."""
    calls, usual = UNUSED_IN_LAST[subject], "backward 0"
    mean_gradients(
        world, subject, "branches", calls, may_refuse=True, ordinary=usual, units="layers"
    )


@clause(
    "fsdp.accumulation.evaluation-in-between",
    judges=BOTH,
    source="contract: as-pytorch, adds-up; " + PAGE,
)
def test_an_evaluation_in_mid_window_disturbs_nothing(world, subject):
    """A forward without gradients between micro-batches MUST change no gradient.

    The whole-model shape may refuse the second micro-batch, and not the forward before it.
    """
    toy, calls = divisible(subject, "stack"), EVALUATED[subject]
    may_refuse = subject == "fsdp"
    mean_gradients(world, subject, toy, calls, may_refuse=may_refuse, ordinary=ORDINARY)
