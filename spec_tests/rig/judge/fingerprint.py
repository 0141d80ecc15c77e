"""Gradients that encode who contributed: decode a reduced value into ranks and micro-batches.

Contributor number c (a rank, or a rank's micro-batch) contributes `BASE**c`. A sum of
contributions is then a number in base `BASE` whose digits count how often each contributed: exact
in float32 for up to twelve contributors in base 4. One number separates mean, sum, local, lost,
doubled and foreign.

>>> digits(contribution(0) + 2 * contribution(2), contributors=3)
(1, 0, 2)
"""

from __future__ import annotations

import math

BASE = 4
MAX_CONTRIBUTORS = 12


def contribution(contributor: int) -> float:
    """What contributor number `contributor` adds.

    Raises:
        ValueError: beyond what float32 holds exactly.
    """
    if not 0 <= contributor < MAX_CONTRIBUTORS:
        raise ValueError(f"contributor {contributor}: expected 0 to {MAX_CONTRIBUTORS - 1}")
    return float(BASE**contributor)


def digits(total: float, *, contributors: int) -> tuple[int, ...] | None:
    """How often each contributed; None if `total` is no sum of contributions."""
    if not math.isfinite(total) or total != int(total) or total < 0:
        return None
    rest, counts = int(total), []
    for _ in range(contributors):
        rest, count = divmod(rest, BASE)
        counts.append(count)
    return tuple(counts) if rest == 0 else None


def story(counts: tuple[int, ...] | None, names: tuple[str, ...]) -> str:
    """The digits in words: what is missing and what came more than once."""
    if counts is None:
        return "no whole number of contributions arrived: something was scaled"
    missing = [name for name, count in zip(names, counts, strict=True) if count == 0]
    doubled = [
        f"{name} ({count} times)" for name, count in zip(names, counts, strict=True) if count > 1
    ]
    parts = []
    if missing:
        parts.append("never arrived: " + ", ".join(missing))
    if doubled:
        parts.append("more than once: " + ", ".join(doubled))
    return "; ".join(parts) or "every contribution arrived once"
