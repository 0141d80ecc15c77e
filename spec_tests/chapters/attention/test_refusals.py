"""Refusals: a wrong argument is said before a kernel reads memory that is not there.

A kernel takes pointers and strides. What does not fit is not an error to it but other values, or a
fault of the whole process. So everything that does not fit is a ValueError that names the argument.
"""

from __future__ import annotations

import re

import pytest
import torch

from spec_tests.chapters.attention import bodies
from spec_tests.chapters.attention.bodies import ATTENTION, call, observe
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="production", worlds=(1,))

SHAPE = (2, 4, 20, 16)


def ones(names, shape=SHAPE, **options):
    """These arguments, with others than the right shape, dtype or device."""
    return {name: torch.ones(shape, **options) for name in names}


# Case to the arguments that differ, of which the first is to be named. All others are right.
BAD = {
    "dtype-of-k": ones("k", dtype=torch.float16),
    "dtype-of-v": ones("v", dtype=torch.float64),
    "batch-of-k": ones("kv", (1, 4, 20, 16)),
    "head-dim-of-k": ones("kv", (2, 4, 20, 8)),
    "length-of-v": ones("v", (2, 4, 21, 16)),
    "heads-of-v": ones("v", (2, 2, 20, 16)),
    "heads-do-not-divide": ones("kv", (2, 3, 20, 16)),
    "more-key-heads": ones("kv", (2, 8, 20, 16)),
    "dims-of-k": ones("kv", (2, 20, 16)),
    "integers": ones("qkv", dtype=torch.int64),
    "complex-numbers": ones("qkv", dtype=torch.complex64),
    "two-dims": ones("qkv", SHAPE[2:]),
    "a-list": {"q": [[1.0]]},
    "none": {"v": None},
    # The one other device that every machine has.
    "device-of-k": ones("k", device="meta"),
}
UNFIT = [case for case in BAD if case != "device-of-k"]
# Python itself says that a list or None is no tensor, in words of its own.
TENSORS = [case for case in UNFIT if case not in ("a-list", "none")]


def refused(ctx, subject, case):
    """The error's kinds and text, or None where something came back."""

    def on_device(value):
        is_moved = isinstance(value, torch.Tensor) and not value.is_meta
        return value.to(ctx.device) if is_moved else value

    given = {name: on_device(value) for name, value in {**ones("qkv"), **BAD[case]}.items()}
    try:
        call(ctx, subject, given["q"], given["k"], given["v"])
    except Exception as error:
        bodies.refusal_of(ctx, subject, error, ("O",))
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
    return None


@clause(
    "attention.refusal.bad-input",
    source="contract: bad-inputs; xformers, test_unsupported; a kernel reads whatever lies there",
)
@pytest.mark.parametrize("case", UNFIT)
def test_inputs_that_do_not_fit_are_refused(world, subject, case):
    """Inputs that do not fit each other MUST be an error: never other values, never a crash."""
    error = observe(world, subject, refused, case)

    judge.holds(error is not None, f"expected an error, got a result for {case}")


@clause("attention.refusal.names-the-argument", source="contract: bad-inputs")
@pytest.mark.parametrize("case", TENSORS)
def test_the_refusal_is_a_value_error_that_names_the_argument(world, subject, case):
    """The error for an input that does not fit MUST be a ValueError that names it."""
    error = observe(world, subject, refused, case) or {"kinds": [], "text": "no error"}

    kinds = {"ValueError", "TypeError", "NotImplementedError"} & {*error["kinds"]}
    judge.holds(bool(kinds), f"expected a ValueError, got {error['kinds'][:1]}: {error['text']}")
    named = {"q", "k", "v", "query", "key", "value", "heads", "kv_heads"}
    judge.holds(
        not named.isdisjoint(re.split(r"[\s,.']+", error["text"])),
        f"expected {next(iter(BAD[case]))!r} to be named, got {error['text']!r}",
    )


@clause(
    "attention.refusal.devices",
    source="contract: bad-inputs; a pointer of another device is a fault of the whole process",
)
def test_inputs_on_two_devices_are_refused(world, subject):
    """Inputs on two devices MUST be an error."""
    error = observe(world, subject, refused, "device-of-k")

    judge.holds(error is not None, "expected an error for k on another device, got a result")
