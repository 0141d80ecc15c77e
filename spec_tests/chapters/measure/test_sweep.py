"""Sweep: batch sizes one after another, each measured as if it were the only one.

A course's table shows the peak of batch 8 for the sizes 1 and 4, because nobody reset it; 475 MB
too many from batch 8 on, because the first model lived on; and nothing beyond the first size that
did not fit. Memory here is the suite's, so every byte of every row is known.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.chapters.measure.machine import Machine, numbers
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=("sweep_batch_sizes",), level="correct", worlds=(1,))
MODEL_BYTES, SEQUENCE_BYTES, SEQUENCE_LENGTH = 1000, 10, 128
CAPACITY = 20 * MODEL_BYTES
TOO_LARGE = CAPACITY // SEQUENCE_BYTES + 1


class Memory:
    """An allocator of `capacity` bytes: models hold some while they live, steps take more."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live = 0
        self._peak = 0

    def allocate(self, size: int) -> None:
        """Raise torch.OutOfMemoryError where it does not fit."""
        if self.live + size > self.capacity:
            raise torch.OutOfMemoryError(
                f"out of memory: {self.live} in use, tried {size}, of {self.capacity}"
            )
        self.live += size
        self._peak = max(self._peak, self.live)

    def free(self, size: int) -> None:
        """Give back."""
        self.live -= size

    def take(self, size: int) -> None:
        """Hold so much for a moment."""
        self.allocate(size)
        self.free(size)

    def reset_peak(self) -> None:
        """The peak is what is in use now."""
        self._peak = self.live

    def peak_bytes(self) -> int:
        """The most since then."""
        return self._peak


class Model:
    """Something that holds `MODEL_BYTES` for as long as anyone refers to it, perhaps itself."""

    itself: Model | None


class Bench(Machine):
    """What `sweep_batch_sizes` is given: sizes that are known to fit, or not to.

    A step of b sequences takes b / 64 seconds, and `SEQUENCE_BYTES` for each on top of the model,
    which takes `building` more bytes for a moment when it is built.
    """

    def __init__(
        self,
        capacity: int = 10**9,
        *,
        is_cyclic: bool = False,
        building: int = 0,
        error: Exception | None = None,
    ) -> None:
        super().__init__(error=error)
        self.memory = Memory(capacity)
        self.live_at_build: list[int] = []
        self._is_cyclic, self._building = is_cyclic, building

    def build(self, batch_size: int) -> Callable[[], None]:
        """A step that owns its model."""
        self.live_at_build.append(self.memory.live)
        self.calls, self.duration = 0, lambda index: batch_size / 64
        self.memory.allocate(MODEL_BYTES)
        model = Model()
        weakref.finalize(model, self.memory.free, MODEL_BYTES)
        model.itself = model if self._is_cyclic else None
        self.memory.take(self._building)

        def step() -> None:
            assert model is not None
            self.memory.take(SEQUENCE_BYTES * batch_size)
            self.step()

        return step


def expected_row(batch_size: int, *, is_oom: bool = False) -> dict[str, Any]:
    """What is right for a size that fits, or does not."""
    return {
        "batch_size": batch_size,
        "is_oom": is_oom,
        "tokens_per_s": None if is_oom else 64.0 * SEQUENCE_LENGTH,
        "peak_bytes": None if is_oom else MODEL_BYTES + SEQUENCE_BYTES * batch_size,
    }


def swept(ctx, batch_sizes, **options):
    """The implementation's rows as plain data, and what was alive when each model was built."""
    bench = Bench(**options)
    rows = ctx.impl.sweep_batch_sizes(
        bench.build,
        batch_sizes=batch_sizes,
        sequence_length=SEQUENCE_LENGTH,
        clock=bench.clock,
        memory=bench.memory,
    )
    return [{key: row[key] for key in expected_row(0)} for row in rows], bench.live_at_build


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


def judge_alive(world, subject, given, **options):
    """Nothing may be alive when a model is built."""
    __tracebackhide__ = True
    [(_, live)] = world.run(swept, [1, 4, 8], **options)
    judge.equal(live, 0, quantity="bytes alive at a build", given=given)


alone = rows(clause, judge_alive)

test_one_model_at_a_time = alone(
    "measure.sweep.one-model-at-a-time",
    "Each model MUST be gone before the next one is built.",
    "models that nobody but their step refers to",
    source="contract: one-model; a course's sweep: a second live model adds 475 MB to every row",
)

test_frees_cycles = alone(
    "measure.sweep.frees-cycles",
    "A model that refers to itself MUST be gone, too, before the next one is built.",
    "models in reference cycles",
    is_cyclic=True,
    level="production",
    source="contract: cycles; "
    "modules and their hooks refer to each other: only the collector frees them",
)


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
