"""Accumulation: how many micro-batches make up a step, exactly, or a refusal.

A course's trainer divides with `//`: a global batch of 6 with micro-batches of 2 on 2 ranks trains
with 4 and says nothing, and one that is too small ends in a division by zero inside the loop.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=("accumulation_steps",), worlds=(1,))


def asked(ctx, global_batch, micro_batch, world_size):
    """The answer, or the kinds and the text of the error."""
    with refusal.caught() as error:
        found = ctx.impl.accumulation_steps(
            global_batch_size=global_batch, micro_batch_size=micro_batch, world_size=world_size
        )
        return {"steps": found, "type": type(found).__name__}
    return error


@clause("training.accumulation.fills-the-global-batch", level="course", source="contract: fills")
@given(micro=st.integers(1, 64), world_size=st.integers(1, 64), number=st.integers(1, 64))
def test_steps_times_micro_batch_times_ranks_is_the_global_batch(
    world, subject, micro, world_size, number
):
    """The answer MUST be the integer that fills the global batch exactly."""
    ranks = world.run(asked, micro * world_size * number, micro, world_size)

    judge.equal(
        ranks,
        {"steps": number, "type": "int"},
        quantity="accumulation steps",
        given=f"{micro * world_size * number} sequences, {micro} at a time, {world_size} ranks",
    )


@clause(
    "training.accumulation.refuses-a-remainder",
    level="correct",
    source="contract: remainder; "
    "a course's trainer floors, and trains with another batch than asked for",
)
@pytest.mark.parametrize("sizes", ["6/2/2", "2/2/2", "7/1/2", "1/2/1", "10/4/1", "12/5/2"])
def test_a_global_batch_that_does_not_divide_is_refused(world, subject, sizes):
    """Batch sizes that do not divide MUST be a ValueError: rounding trains another batch."""
    ranks = world.run(asked, *map(int, sizes.split("/")))

    for rank, found in enumerate(ranks):
        judge.holds(
            "ValueError" in found.get("kinds", ()),
            f"rank {rank}: expected a ValueError, got {found}",
            given=f"global / micro / ranks = {sizes}",
        )


@clause(
    "training.accumulation.names-the-numbers",
    level="production",
    source="contract: remainder; a message says what was expected, what came, what to do",
)
def test_the_refusal_names_the_numbers(world, subject):
    """The refusal SHOULD name the global batch, the micro-batch and the number of ranks."""
    ranks = world.run(asked, 26, 4, 3)

    for found in ranks:
        text = found.get("text", "")
        missing = [number for number in ("26", "4", "3") if number not in text]
        judge.holds(not missing, f"expected {missing} in {text!r}")
