"""A machine whose time is a number: what a step takes there is known exactly.

Times are dyadic fractions of a second, so that differences of readings are exact, and a report can
be held against the answer without a tolerance for anything but one division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
