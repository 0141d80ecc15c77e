"""A machine whose time and memory are numbers: what a step takes there is known exactly.

Times are dyadic fractions of a second, so that differences of readings are exact, and a report can
be held against the answer without a tolerance for anything but one division.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_tests.rig.judge.tolerance import rounding

# One division, and a quantile's interpolation.
SAME = rounding(torch.float64, terms=4)
LIMIT = 2000  # steps after which a measurement is taken to be without end


class EndlessError(Exception):
    """More steps were taken than any measurement needs."""


class Machine:
    """Steps whose durations are `duration(index)` seconds, and a clock that only they move."""

    def __init__(self, duration: Callable[[int], float]) -> None:
        self.duration = duration
        self.now = 0.0
        self.calls = 0

    def step(self) -> None:
        """Takes the next duration."""
        if self.calls == LIMIT:
            raise EndlessError(f"{LIMIT} steps")
        self.now += self.duration(self.calls)
        self.calls += 1

    def clock(self) -> float:
        """Seconds."""
        return self.now


def _uneven(index: int) -> float:
    return (1.0, 1.0, 0.5, 1.0, 1.0, 4.0, 1.0)[index % 7]


DURATIONS: dict[str, Callable[[int], float]] = {
    "constant": lambda index: 0.25,
    # Lazy state, caches and compilation: three slow steps, then none.
    "slow-start": lambda index: 10.0 if index < 3 else 0.25,
    # One step in seven takes four times as long, another half. The median is 1 of any five in a
    # row, and of every second or third, which is what is left to who warms up in between.
    "uneven": _uneven,
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


class Bench:
    """What `sweep_batch_sizes` is given: sizes that are known to fit, or not to.

    A step of b sequences takes b / 64 seconds, and `SEQUENCE_BYTES` for each on top of the model.
    """

    def __init__(
        self,
        capacity: int = 10**9,
        *,
        is_cyclic: bool = False,
        building: int = 0,
        error: Exception | None = None,
    ) -> None:
        self.memory = Memory(capacity)
        self.now = 0.0
        self.live_at_build: list[int] = []
        self.calls = 0
        self._is_cyclic, self._building = is_cyclic, building
        self._error = error

    def build(self, batch_size: int) -> Callable[[], None]:
        """A step that owns its model; `building` bytes are taken for a moment."""
        self.live_at_build.append(self.memory.live)
        self.calls = 0
        model = Model(self.memory, MODEL_BYTES, is_cyclic=self._is_cyclic)
        self.memory.allocate(self._building)
        self.memory.free(self._building)

        def step() -> None:
            self.calls += 1
            if self.calls > LIMIT:
                raise EndlessError(f"{LIMIT} steps")
            assert model is not None
            if self._error is not None and self.calls == 2:
                raise self._error
            self.memory.allocate(SEQUENCE_BYTES * batch_size)
            self.memory.free(SEQUENCE_BYTES * batch_size)
            self.now += batch_size / 64

        return step

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def sweep(self, ctx: Any, batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
        """The implementation's rows, as plain data."""
        rows = ctx.impl.sweep_batch_sizes(
            self.build,
            batch_sizes=list(batch_sizes),
            sequence_length=SEQUENCE_LENGTH,
            clock=self.clock,
            memory=self.memory,
        )
        keys = ("batch_size", "is_oom", "tokens_per_s", "peak_bytes")
        return [{key: row[key] for key in keys} for row in rows]


def expected_row(batch_size: int, *, is_oom: bool = False) -> dict[str, Any]:
    """What is right for a size that fits, or does not."""
    if is_oom:
        nothing = {"tokens_per_s": None, "peak_bytes": None}
        return {"batch_size": batch_size, "is_oom": True, **nothing}
    return {
        "batch_size": batch_size,
        "is_oom": False,
        "tokens_per_s": 64.0 * SEQUENCE_LENGTH,
        "peak_bytes": MODEL_BYTES + SEQUENCE_BYTES * batch_size,
    }
