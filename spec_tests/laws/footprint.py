"""Footprint: bytes that stay or peak, written as a sum of named terms with a stated slack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec_tests.rig import judge


def at_most(
    observed: Sequence[int],
    terms: Mapping[str, int],
    *,
    quantity: str,
    likely: str = "",
    given: str = "",
) -> None:
    """No rank's bytes may exceed the sum of the terms.

    Args:
        observed: bytes, one number per rank.
        terms: what is allowed to be there, by name: {"gradients": 4096, "buckets": 4096}.
    """
    __tracebackhide__ = True
    allowed = sum(terms.values())
    for rank, number in enumerate(observed):
        sum_of_terms = " + ".join(f"{name} {size}" for name, size in terms.items())
        judge.holds(
            number <= allowed,
            f"rank {rank}: expected {quantity} of at most {allowed} bytes ({sum_of_terms}), "
            f"got {number}, {number / allowed:.2f} times that",
            likely=likely,
            given=given,
        )
