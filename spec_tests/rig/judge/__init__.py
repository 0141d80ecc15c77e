"""From what ranks returned to a verdict: what is right, how near, what a difference looks like."""

from spec_tests.rig.judge.assertions import (
    SITUATION,
    Situation,
    Tensors,
    Violation,
    equal,
    holds,
    judging,
    same_on_all_ranks,
    tensors,
    unreadable_is_a_finding,
    violated,
)

__all__ = [
    "SITUATION",
    "Situation",
    "Tensors",
    "Violation",
    "equal",
    "holds",
    "judging",
    "same_on_all_ranks",
    "tensors",
    "unreadable_is_a_finding",
    "violated",
]
