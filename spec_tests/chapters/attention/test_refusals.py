"""Refusals: a wrong argument is said before a kernel reads memory that is not there.

A kernel takes pointers and strides. What does not fit is not an error to it but other values, or a
fault of the whole process. So everything that does not fit is a ValueError that names the argument.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies
from spec_tests.chapters.attention.bodies import ATTENTION, call, observe
from spec_tests.chapters.attention.problem import WHOLE_TILES, Problem
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="production", worlds=(1,))

SHAPE = (2, 4, 20, 16)


def _with(**changed):
    """Right arguments with some replaced."""
    right = {"q": torch.ones(SHAPE), "k": torch.ones(SHAPE), "v": torch.ones(SHAPE)}
    return {**right, **changed}


# Name to (what the message names, arguments).
BAD = {
    "dtype-of-k": ("k", lambda: _with(k=torch.ones(SHAPE, dtype=torch.float16))),
    "dtype-of-v": ("v", lambda: _with(v=torch.ones(SHAPE, dtype=torch.float64))),
    "batch-of-k": ("k", lambda: _with(k=torch.ones(1, 4, 20, 16), v=torch.ones(1, 4, 20, 16))),
    "head-dim-of-k": ("k", lambda: _with(k=torch.ones(2, 4, 20, 8), v=torch.ones(2, 4, 20, 8))),
    "length-of-v": ("v", lambda: _with(v=torch.ones(2, 4, 21, 16))),
    "heads-of-v": ("v", lambda: _with(v=torch.ones(2, 2, 20, 16))),
    "heads-do-not-divide": (
        "k",
        lambda: _with(k=torch.ones(2, 3, 20, 16), v=torch.ones(2, 3, 20, 16)),
    ),
    "more-key-heads": ("k", lambda: _with(k=torch.ones(2, 8, 20, 16), v=torch.ones(2, 8, 20, 16))),
    "dims-of-k": ("k", lambda: _with(k=torch.ones(2, 20, 16), v=torch.ones(2, 20, 16))),
    "integers": ("q", lambda: {name: torch.ones(SHAPE, dtype=torch.int64) for name in "qkv"}),
    "complex-numbers": (
        "q",
        lambda: {name: torch.ones(SHAPE, dtype=torch.complex64) for name in "qkv"},
    ),
    "two-dims": ("q", lambda: {name: torch.ones(SHAPE[2:]) for name in "qkv"}),
    "a-list": ("q", lambda: _with(q=[[1.0]])),
    "none": ("v", lambda: _with(v=None)),
}


def _whole_tiles(ctx, subject):
    """The ordinary call: an error is a refusal only from whoever can do this."""
    bodies.forward(ctx, subject, Problem(seq_q=WHOLE_TILES))


def refused(ctx, subject, case):
    """The error's kinds and text, or None where something came back."""
    given = BAD[case][1]()
    moved = {n: t.to(ctx.device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    try:
        call(ctx, subject, moved["q"], moved["k"], moved["v"])
    except Exception as error:
        _whole_tiles(ctx, subject)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "text": str(error)}
    return None


@clause(
    "attention.refusal.bad-input",
    source="contract: bad-inputs; xformers, test_unsupported; a kernel reads whatever lies there",
)
@pytest.mark.parametrize("case", BAD)
def test_inputs_that_do_not_fit_are_refused(world, subject, case):
    """Inputs that do not fit each other MUST be an error: never other values, never a crash."""
    error = observe(world, subject, refused, case)

    judge.holds(error is not None, f"expected an error, got a result for {case}")


@clause("attention.refusal.names-the-argument", source="contract: bad-inputs")
@pytest.mark.parametrize("case", BAD)
def test_the_refusal_is_a_value_error_that_names_the_argument(world, subject, case):
    """The error for an input that does not fit MUST be a ValueError that names it."""
    error = observe(world, subject, refused, case) or {"kinds": [], "text": "no error"}

    kinds = {"ValueError", "TypeError", "NotImplementedError"} & {*error["kinds"]}
    judge.holds(bool(kinds), f"expected a ValueError, got {error['kinds'][:1]}: {error['text']}")
    words = error["text"].replace(",", " ").replace(".", " ").replace("'", " ").split()
    judge.holds(
        bool({"q", "k", "v", "query", "key", "value", "heads", "kv_heads"} & {*words}),
        f"expected {BAD[case][0]!r} to be named, got {error['text']!r}",
    )


def mixed_devices(ctx, subject):
    """As `refused`, with k on the meta device: the one other device that every machine has."""
    tensors = _with(k=torch.ones(SHAPE, device="meta"))
    try:
        call(ctx, subject, *(t if n == "k" else t.to(ctx.device) for n, t in tensors.items()))
    except Exception as error:
        _whole_tiles(ctx, subject)
        return str(error) or type(error).__name__
    return None


@clause(
    "attention.refusal.devices",
    source="contract: bad-inputs; a pointer of another device is a fault of the whole process",
)
def test_inputs_on_two_devices_are_refused(world, subject):
    """Inputs on two devices MUST be an error."""
    error = observe(world, subject, mixed_devices)

    judge.holds(error is not None, "expected an error for k on another device, got a result")
