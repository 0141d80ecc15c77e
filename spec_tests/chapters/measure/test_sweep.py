"""Sweep: batch sizes one after another, each measured as if it were the only one.

A course's table shows the peak of batch 8 for the sizes 1 and 4, because nobody reset it; 475 MB
too many from batch 8 on, because the first model lived on; and nothing beyond the first size that
did not fit. Memory here is the suite's, so every byte of every row is known.
"""

from __future__ import annotations

import builtins

import pytest

from spec_tests.chapters.measure.machine import (
    MODEL_BYTES,
    SEQUENCE_BYTES,
    Bench,
    expected_row,
    numbers,
)
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=("sweep_batch_sizes",), level="correct", worlds=(1,))
CAPACITY = 20 * MODEL_BYTES
TOO_LARGE = CAPACITY // SEQUENCE_BYTES + 1


def swept(ctx, batch_sizes, **options):
    """The rows, and what was alive when each model was built."""
    bench = Bench(**options)
    return bench.sweep(ctx, batch_sizes), bench.live_at_build


def judge_rows(world, expected, *, likely, given="", **options):
    """There must be these rows; return what was alive when each model was built."""
    __tracebackhide__ = True
    sizes = [row["batch_size"] for row in expected]
    given = f"batch sizes {sizes}{given}"
    [(found, live)] = world.run(swept, sizes, **options)
    judge.equal([len(found)], len(expected), quantity="number of rows", given=given)
    for seen, row in zip(found, expected, strict=True):
        rate = {"tokens_per_s": row["tokens_per_s"]}
        judge.holds(
            seen | rate == row, f"rank 0: expected {row}, got {seen}", likely=likely, given=given
        )
        numbers(seen, rate, given=f"{given}, batch size {row['batch_size']}")
    return live


@clause("measure.sweep.rows", level="course", source="contract: rows")
def test_there_is_a_row_for_each_size(world, subject):
    """Each batch size MUST have a row, in the caller's order, with its own rate and peak."""
    likely = "the peak of another moment, or tokens of another batch"
    judge_rows(world, [expected_row(size) for size in (1, 4, 8)], likely=likely)


@clause(
    "measure.sweep.resets-peaks",
    source="contract: own-peak; a course's table: the peaks of batches 1 and 4 are that of batch 8",
)
def test_a_small_size_after_a_large_one_has_its_own_peak(world, subject):
    """A row MUST be the same whatever sizes came before it."""
    judge_rows(world, [expected_row(size) for size in (8, 1, 4)], likely="the peak is never reset")


@clause("measure.sweep.peaks-of-steps", source="contract: own-peak")
def test_the_peak_is_that_of_the_steps(world, subject):
    """A row's peak MUST NOT include memory used only while a model was built."""
    judge_rows(
        world,
        [expected_row(size) for size in (1, 4)],
        likely="the peak is reset before the model is built, and not after",
        given=", models that are built with a hundred times their size",
        building=100 * MODEL_BYTES,
    )


@clause(
    "measure.sweep.one-model-at-a-time",
    source="contract: one-model; a course's sweep: a second live model adds 475 MB to every row",
)
def test_a_model_is_gone_before_the_next_is_built(world, subject):
    """Each model MUST be gone before the next one is built."""
    judge_alive(world, "models that nobody but their step refers to")


@clause(
    "measure.sweep.frees-cycles",
    level="production",
    source="contract: cycles; "
    "modules and their hooks refer to each other: only the collector frees them",
)
def test_a_model_in_a_cycle_is_gone_as_well(world, subject):
    """A model that refers to itself MUST be gone, too, before the next one is built."""
    judge_alive(world, "models in reference cycles", is_cyclic=True)


def judge_alive(world, given, **options):
    """Nothing may be alive when a model is built."""
    __tracebackhide__ = True
    [(_, live)] = world.run(swept, [1, 4, 8], **options)
    judge.equal(live, 0, quantity="bytes alive at a build", given=given)


@clause(
    "measure.sweep.survives-out-of-memory",
    source="contract: out-of-memory, goes-on; "
    "PyTorch FAQ: my out of memory exception handler can't allocate memory",
)
@pytest.mark.parametrize("where", ["step", "build"])
def test_a_size_that_does_not_fit_is_a_row_and_smaller_ones_follow(world, subject, where):
    """A size that does not fit MUST be a row that says so; smaller ones after it are measured."""
    sizes, capacity = ((4, TOO_LARGE, 2), CAPACITY)
    if where == "build":
        sizes, capacity = ((4, 3, 2), MODEL_BYTES // 2)
    live = judge_rows(
        world,
        [expected_row(size, is_oom=where == "build" or size == TOO_LARGE) for size in sizes],
        likely="the first error ended the sweep, or the model that did not fit is still alive",
        given=f", no memory in the {where}",
        capacity=capacity,
    )
    given = "a traceback refers to frames, and they to the model"
    judge.equal(live, 0, quantity="bytes alive at a build", given=given)


@clause(
    "measure.sweep.other-errors-reach-the-caller",
    source="contract: other-errors; "
    "`except RuntimeError: continue` makes a defect look like a large batch",
)
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError", "KeyError"])
def test_an_error_that_is_not_of_memory_is_no_row(world, subject, kind):
    """An error that is not out of memory MUST reach the caller."""
    error = getattr(builtins, kind)("from the step: the size of a tensor must match")
    ranks = world.run(refusal.raised, swept, [1, 2], error=error)

    found = [(rank["kinds"][:1], "from the step" in rank["text"]) for rank in ranks]
    judge.equal(found, ([kind], True), quantity="error", given=f"the second step raises {kind}")
