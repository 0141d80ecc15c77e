"""Sweep: batch sizes one after another, each measured as if it were the only one.

A course's table shows the peak of batch 8 for the sizes 1 and 4, because nobody reset it; 475 MB
too many from batch 8 on, because the first model lived on; and nothing beyond the first size that
did not fit. Memory here is the suite's, so every byte of every row is known.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.measure.machine import (
    MODEL_BYTES,
    SAME,
    SEQUENCE_BYTES,
    Bench,
    expected_row,
)
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=("sweep_batch_sizes",), level="correct", worlds=(1,))
CAPACITY = 20 * MODEL_BYTES
TOO_LARGE = CAPACITY // SEQUENCE_BYTES + 1


def swept(ctx, batch_sizes, capacity=10**9, is_cyclic=False, building=0):
    """The rows, and what was alive when each model was built."""
    bench = Bench(capacity, is_cyclic=is_cyclic, building=building)
    return bench.sweep(ctx, batch_sizes), bench.live_at_build


def judge_rows(world, expected, *, likely, given, **bench):
    """There must be these rows; return what was alive when each model was built."""
    __tracebackhide__ = True
    sizes = [row["batch_size"] for row in expected]
    [(found, live)] = world.run(swept, sizes, **bench)
    judge.equal([len(found)], len(expected), quantity="number of rows", given=given)
    for seen, row in zip(found, expected, strict=True):
        exact = {key: seen[key] for key in row if key != "tokens_per_s"}
        wanted = {key: row[key] for key in exact}
        judge.holds(
            exact == wanted, f"rank 0: expected {wanted}, got {exact}", likely=likely, given=given
        )
        rate, right = seen["tokens_per_s"], row["tokens_per_s"]
        is_near = rate is right is None or (
            None not in (rate, right) and abs(rate - right) <= SAME.bound(torch.tensor(right))
        )
        judge.holds(
            is_near,
            f"rank 0: expected tokens_per_s {right} for batch {row['batch_size']}, got {rate}",
            given=given,
        )
    return live


@clause("measure.sweep.rows", level="course", source="contract: rows")
def test_there_is_a_row_for_each_size(world, subject):
    """Each batch size MUST have a row, in the caller's order, with its own rate and peak."""
    judge_rows(
        world,
        [expected_row(size) for size in (1, 4, 8)],
        likely="the peak of another moment, or tokens of another batch",
        given="batch sizes 1, 4, 8",
    )


@clause(
    "measure.sweep.resets-peaks",
    source="contract: own-peak; a course's table: the peaks of batches 1 and 4 are that of batch 8",
)
def test_a_small_size_after_a_large_one_has_its_own_peak(world, subject):
    """A row MUST be the same whatever sizes came before it."""
    judge_rows(
        world,
        [expected_row(size) for size in (8, 1, 4)],
        likely="the peak is never reset",
        given="batch sizes 8, 1, 4",
    )


@clause("measure.sweep.peaks-of-steps", source="contract: own-peak")
def test_the_peak_is_that_of_the_steps(world, subject):
    """A row's peak MUST NOT include memory used only while a model was built."""
    judge_rows(
        world,
        [expected_row(size) for size in (1, 4)],
        likely="the peak is reset before the model is built, and not after",
        given="models that are built with a hundred times their size",
        building=100 * MODEL_BYTES,
    )


@clause(
    "measure.sweep.one-model-at-a-time",
    source="contract: one-model; a course's sweep: a second live model adds 475 MB to every row",
)
def test_a_model_is_gone_before_the_next_is_built(world, subject):
    """Each model MUST be gone before the next one is built."""
    [(_, live)] = world.run(swept, [1, 4, 8])

    judge.equal(
        live,
        0,
        quantity="bytes alive at a build",
        given="models that nobody but their step refers to",
    )


@clause(
    "measure.sweep.frees-cycles",
    level="production",
    source="contract: cycles; "
    "modules and their hooks refer to each other: only the collector frees them",
)
def test_a_model_in_a_cycle_is_gone_as_well(world, subject):
    """A model that refers to itself MUST be gone, too, before the next one is built."""
    [(_, live)] = world.run(swept, [1, 4, 8], is_cyclic=True)

    judge.equal(live, 0, quantity="bytes alive at a build", given="models in reference cycles")


@clause(
    "measure.sweep.survives-out-of-memory",
    source="contract: out-of-memory, goes-on; "
    "PyTorch FAQ: my out of memory exception handler can't allocate memory",
)
@pytest.mark.parametrize("where", ["step", "build"])
def test_a_size_that_does_not_fit_is_a_row_and_smaller_ones_follow(world, subject, where):
    """A size that does not fit MUST be a row that says so; smaller ones after it are measured."""
    if where == "step":
        capacity = CAPACITY
        expected = [expected_row(size, is_oom=size == TOO_LARGE) for size in (4, TOO_LARGE, 2)]
    else:
        capacity = MODEL_BYTES // 2
        expected = [expected_row(size, is_oom=True) for size in (4, 3, 2)]
    live = judge_rows(
        world,
        expected,
        likely="the first error ended the sweep, or the model that did not fit is still alive",
        given=f"batch sizes {[row['batch_size'] for row in expected]}, no memory in the {where}",
        capacity=capacity,
    )
    judge.equal(
        live,
        0,
        quantity="bytes alive at a build",
        given="a traceback refers to frames, and they to the model",
    )


def failing(ctx, kind):
    """What the caller gets when a step fails for another reason."""
    errors = {
        "ValueError": ValueError("from the step"),
        "RuntimeError": RuntimeError("from the step: the size of a tensor must match"),
        "KeyError": KeyError("from the step"),
    }
    with refusal.caught() as error:
        Bench(error=errors[kind]).sweep(ctx, [1, 2])
    return error["kinds"][:1], "from the step" in error["text"]


@clause(
    "measure.sweep.other-errors-reach-the-caller",
    source="contract: other-errors; "
    "`except RuntimeError: continue` makes a defect look like a large batch",
)
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError", "KeyError"])
def test_an_error_that_is_not_of_memory_is_no_row(world, subject, kind):
    """An error that is not out of memory MUST reach the caller."""
    ranks = world.run(failing, kind)

    judge.equal(ranks, ([kind], True), quantity="error", given=f"the second step raises {kind}")
