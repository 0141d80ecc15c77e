"""A machine whose time and memory are numbers: what a step takes there is known exactly.

Times are dyadic fractions of a second, so that differences of readings are exact, and a report can
be held against the answer without a tolerance for anything but one division.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spec_tests.rig import judge
from spec_tests.rig.judge.tolerance import rounding

# One division, and a quantile's interpolation.
SAME = rounding(torch.float64, terms=4).relative
LIMIT = 2000  # steps after which a measurement is taken to be without end


def numbers(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    within: float = SAME,
    likely: str = "",
    given: str = "",
) -> None:
    """Each of these numbers must be the expected one, or lie between two.

    Args:
        expected: by name a number, None, or the least and the largest that are right.
        within: relative error that is allowed of one number.
    """
    __tracebackhide__ = True
    for name, right in expected.items():
        seen, words, least, most = found[name], str(right), right, right
        if isinstance(right, tuple):
            least, most = right
            words = f"from {least:.6g} to {most:.6g}"
        elif right is not None:
            allowed = within * max(abs(right), 1.0)
            least, most = right - allowed, right + allowed
        is_right = seen is right or (None not in (seen, right) and least <= seen <= most)
        finding = f"rank 0: expected {name} {words}, got {seen}"
        judge.holds(is_right, finding, likely=likely, given=given)


class EndlessError(Exception):
    """More steps were taken than any measurement needs."""


class Machine:
    """Steps that take `duration(index)` seconds, and a clock that only they move.

    Args:
        error: raised in step number `at`, the first being 1.
    """

    def __init__(
        self,
        duration: Callable[[int], float] = lambda index: 0.25,
        error: Exception | None = None,
        at: int = 2,
    ) -> None:
        self.duration, self.error, self.at = duration, error, at
        self.now = 0.0
        self.calls = 0

    def step(self) -> None:
        """Takes the next duration."""
        if self.calls == LIMIT:
            raise EndlessError(f"{LIMIT} steps")
        self.now += self.duration(self.calls)
        self.calls += 1
        if self.error is not None and self.calls == self.at:
            raise self.error

    def clock(self) -> float:
        """Seconds."""
        return self.now


DURATIONS: dict[str, Callable[[int], float]] = {
    "constant": lambda index: 0.25,
    # Lazy state, caches and compilation: three slow steps, then none.
    "slow-start": lambda index: 10.0 if index < 3 else 0.25,
    # One step in seven takes four times as long, another half. The median is 1 of any five in a
    # row, and of every second or third, which is what is left to who warms up in between.
    "uneven": lambda index: (1.0, 1.0, 0.5, 1.0, 1.0, 4.0, 1.0)[index % 7],
    # An allocator that grows for a while.
    "long-warm-up": lambda index: 1.0 + 20.0 * 0.8**index,
    # Something that leaks.
    "never-steady": lambda index: 1.125**index,
}


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
    """Something that holds `size` bytes for as long as anyone refers to it."""

    def __init__(self, memory: Memory, size: int, *, is_cyclic: bool) -> None:
        memory.allocate(size)
        weakref.finalize(self, memory.free, size)
        self.itself = self if is_cyclic else None


MODEL_BYTES, SEQUENCE_BYTES, SEQUENCE_LENGTH = 1000, 10, 128


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
        model = Model(self.memory, MODEL_BYTES, is_cyclic=self._is_cyclic)
        self.memory.take(self._building)

        def step() -> None:
            assert model is not None
            self.memory.take(SEQUENCE_BYTES * batch_size)
            self.step()

        return step

    def sweep(self, ctx: Any, batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
        """The implementation's rows, as plain data."""
        rows = ctx.impl.sweep_batch_sizes(
            self.build,
            batch_sizes=list(batch_sizes),
            sequence_length=SEQUENCE_LENGTH,
            clock=self.clock,
            memory=self.memory,
        )
        return [{key: row[key] for key in expected_row(0)} for row in rows]


def expected_row(batch_size: int, *, is_oom: bool = False) -> dict[str, Any]:
    """What is right for a size that fits, or does not."""
    return {
        "batch_size": batch_size,
        "is_oom": is_oom,
        "tokens_per_s": None if is_oom else 64.0 * SEQUENCE_LENGTH,
        "peak_bytes": None if is_oom else MODEL_BYTES + SEQUENCE_BYTES * batch_size,
    }
