"""Accumulation: several micro-batches per step, reduced when asked for.

Gradients that wait for their reduction live outside of `.grad`: whole, on every rank, in a place
that an optimizer does not know. So `zero_grad` may miss them, freeing the weights may take them
along, and the micro-batch that reduces may not use every unit that has something waiting.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded
from spec_tests.laws import equivalence, refusal
from spec_tests.rig import judge
from spec_tests.rig.recorder import Kind
from spec_tests.rig.symptoms import Hint

clause = clauses(judges=FULLY_SHARD, level="correct")

PAGE = "FSDPModule.set_requires_gradient_sync, set_reshard_after_backward"
WINDOWS = {
    "last": (False, False, True),
    "each": (True, True, True),
    "mixed": (True, False, True),
}


def accumulated(ctx, subject, toy, seed, flags, keeps, reshard_after_forward):
    """Gradients after micro-batches of which those with a True flag are reduced."""
    sharded = Sharded(
        ctx, subject, toy, seed, units="nested", reshard_after_forward=reshard_after_forward
    )
    for micro, is_reduced in enumerate(flags):
        is_last = micro == len(flags) - 1
        sharded.synchronise(is_reduced)
        sharded.keep_after_backward(keeps and not is_last)
        sharded.loss(micro).backward()
    return sharded.stepped()


@clause(
    "fsdp.accumulation.any-schedule",
    source=f"{PAGE}; Efficient DL week 5, the two bonuses on accumulation",
    worlds=(2, 3),
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_any_schedule_of_reductions_gives_the_same_gradient(world, subject, window, keeps):
    """Whichever micro-batches are reduced, freed or kept, the gradient MUST be that of them all."""
    ranks = world.run(accumulated, subject, "stack", 7, WINDOWS[window], keeps, not keeps)

    equivalence.mean_gradients(
        ranks, "stack", 7, micros=(0, 1, 2), absent_is_zero=True, given=f"reduced {window}"
    )


def silent_window(ctx, subject, toy, seed):
    """What two micro-batches send that are not to be reduced, and the gradients at the end."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.backward(5)
    sharded.optimizer.zero_grad()
    with ctx.recording() as recorder:
        sharded.accumulate(0)
        sharded.accumulate(1)
    return len(recorder.log().collectives(Kind.REDUCTION))


@clause("fsdp.accumulation.sends-no-gradient", source=PAGE)
def test_a_micro_batch_that_is_not_reduced_sends_no_gradient(world, subject):
    """With gradient synchronisation off, a backward MUST NOT reduce anything.

    The numbers are right either way: only a look at the traffic tells.
    """
    ranks = world.run(silent_window, subject, "even", 7)

    judge.equal(ranks, 0, quantity="number of reductions in two micro-batches")


def discarded(ctx, subject, toy, seed, set_to_none):
    """Gradients of one clean micro-batch after a window was discarded by zero_grad."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.backward(5)
    sharded.optimizer.zero_grad(set_to_none=set_to_none)
    sharded.accumulate(0)
    sharded.optimizer.zero_grad(set_to_none=set_to_none)
    sharded.backward(1)
    return sharded.stepped()


@clause(
    "fsdp.accumulation.zero-grad-discards",
    source="contract: zero_grad clears what waits for its reduction too; as ddp does",
)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_zero_grad_inside_a_window_discards_what_was_pending(world, subject, set_to_none):
    """`zero_grad` between micro-batches MUST discard unreduced gradients as it discards `.grad`.

    Otherwise a step that was skipped, for an overflow say, comes back with the next one.
    """
    ranks = world.run(discarded, subject, "stack", 7, set_to_none)

    both = equivalence.full_batch_gradients("stack", 7, ranks=range(world.size), micros=(0, 1))
    equivalence.mean_gradients(
        ranks,
        "stack",
        7,
        micros=(1,),
        absent_is_zero=True,
        hints=[Hint("the discarded micro-batch is still in it: a hidden accumulator", both)],
        given="window, zero_grad, one clean micro-batch",
    )


def used_early(ctx, subject, seed):
    """Gradients where branch c is used only in the micro-batch that is not reduced."""
    sharded = Sharded(ctx, subject, "branches", seed, units="layers")
    sharded.synchronise(False)
    sharded.loss(0, use="abc").backward()
    sharded.synchronise(True)
    sharded.backward(1, use="ab")
    return sharded.stepped()


@clause(
    "fsdp.accumulation.unused-in-last",
    source="pytorch issue 69031, on DistributedDataParallel",
    worlds=(2, 3),
)
def test_a_unit_used_only_in_an_early_micro_batch_is_reduced(world, subject):
    """A unit used only before the reducing micro-batch MUST be reduced, or be an error."""
    ranks = refusal.answer_or_refusal(
        world, used_early, subject, 7, ordinary=(evaluated, subject, "even", 7)
    )

    if ranks is not None:
        equivalence.mean_gradients(
            ranks,
            "branches",
            7,
            micros=(0, 1),
            flags=lambda rank, micro: {"use": ("abc", "ab")[micro]},
            absent_is_zero=True,
            given="branch c used in micro-batch 0 only",
        )


def evaluated(ctx, subject, toy, seed):
    """Gradients of two micro-batches with evaluations in between."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.accumulate(0)
    with torch.no_grad():
        sharded.loss(7)
    sharded.backward(1)
    with torch.no_grad():
        sharded.loss(8)
    return sharded.stepped()


@clause("fsdp.accumulation.evaluation-in-between", source=PAGE)
def test_an_evaluation_in_mid_window_disturbs_nothing(world, subject):
    """A forward without gradients between micro-batches MUST change no gradient."""
    ranks = world.run(evaluated, subject, "stack", 7)

    equivalence.mean_gradients(ranks, "stack", 7, micros=(0, 1), absent_is_zero=True)
