"""The shape that most clauses of this chapter have: a problem, and the definition's answer."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest
from collections.abc import Callable, Sequence

import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.problem import AS_THE_EXERCISE, FITS, RAGGED, Answer, Problem
from spec_tests.rig import judge
from spec_tests.rig.ranks.errors import NotOffered, RankDied, RankHung
from spec_tests.rig.ranks.world import World

# What is only tried says nothing: the case that is judged then meets the same.
FAILURES = (Exception, RankDied, RankHung)
GRADIENTS = rules.GRADIENTS
OUTPUT_AND_GRADIENTS = ("O", *GRADIENTS)
OUTPUT_AND_LSE = ("O", "L")
ALL = ("O", "L", *GRADIENTS)
BODIES = (bodies.gradients, bodies.forward)

_FIT: dict[tuple[object, ...], str] = {}
_TAKES_CAUSAL: dict[tuple[object, ...], bool] = {}
_TAKES: dict[tuple[object, ...], bool] = {}


def is_tf32(world: World, subject: str) -> bool:
    """Whether products of float32 may have the eleven bits of TF32 and float16.

    On a GPU they may: level production asks for more. Elsewhere they may in what forms no others:
    the exercise accepts that, and `attention.forward.float32-products` fails for it, alone.
    """
    return world.transport == "cuda" or rounds_products(world, subject)


def rounds_products(world: World, subject: str) -> bool:
    """True where the exercise's sizes have the rounding of eleven bits, and not that of float32."""
    key = (world.target, subject, world.transport, "products")
    if key not in _TAKES:
        _TAKES[key] = False
        with _aside():
            for body in BODIES:
                with contextlib.suppress(*FAILURES):
                    seen = bodies.observe(world, subject, body, AS_THE_EXERCISE)
                    of_24, of_11 = (
                        rules.faults(seen, AS_THE_EXERCISE, names=seen, tf32=tf32)
                        for tf32 in (False, True)
                    )
                    _TAKES[key] = bool(of_24) and not of_11
                    break
    return _TAKES[key]


def as_defined(
    world: World, subject: str, problem: Problem, *names: str, tf32: bool | None = None
) -> None:
    """What the subject answers must be the definition's: those of O, L, dQ, dK and dV.

    Args:
        tf32: whether products of float32 may have eleven bits; None asks `is_tf32`.

    Raises:
        Violation: it names the tensors, the broken rule and what the values look like.
        NotOffered: the backward is left open, and what the clause asks of the forward holds.
    """
    __tracebackhide__ = True
    tf32 = is_tf32(world, subject) if tf32 is None else tf32
    if {*GRADIENTS} & {*names} and not offers_backward(world, subject):
        names = tuple(name for name in names if name not in GRADIENTS)
        if names:  # the forward is judged all the same
            seen = bodies.observe(world, subject, bodies.forward, problem, lse="L" in names)
            rules.close(seen, problem, names=names, tf32=tf32)
        raise NotOffered("the backward is left open")
    if not {*GRADIENTS} & {*names}:
        seen = bodies.observe(world, subject, bodies.forward, problem, lse="L" in names)
    else:
        body = bodies.everything if "L" in names else bodies.gradients
        seen = bodies.observe(world, subject, body, problem)
    rules.close(seen, problem, names=names, tf32=tf32)


def fitting(
    world: World,
    subject: str,
    problem: Problem,
    *,
    fits: tuple[str, ...] = FITS,
    is_about_dtype: bool = False,
) -> Problem:
    """The problem in sizes that the subject takes, for clauses that are about another matter.

    What insists on whole tiles, or on as many queries as keys, fails the clauses about sizes
    (`attention.shapes.ragged-lengths` holds the very problems that are tried here), and no others.
    What is wrong in all sizes alike is judged on the problem as it is.

    Args:
        fits: those of `FITS` that leave of the problem what the clause is about.
        is_about_dtype: a dtype that the subject refuses fails the clause.

    Raises:
        SkipTest: see `require_causal`; or the subject refuses the dtype.
    """
    require_causal(world, subject, problem)
    if not is_about_dtype and not takes_dtype(world, subject, problem.dtype):
        raise unittest.SkipTest(
            f"it takes no {problem.dtype}, for which attention.*.half-precision fail"
        )
    key = (world.target, subject, world.transport, problem.causal, fits)
    if key not in _FIT:
        ragged = RAGGED.but(causal=problem.causal)
        best = len(OUTPUT_AND_GRADIENTS)
        with _aside():
            right: dict[str, int] = {}
            for fit in fits:
                right[fit] = _num_right(world, subject, ragged.fitted(fit))
                if right[fit] == best:
                    break
            if max(right.values()) < 0:  # none is answered: the strictest, which most kernels take
                right[fits[-1]] = 0
        _FIT[key] = max(right, key=lambda fit: right[fit])
    return problem.fitted(_FIT[key]) if _FIT[key] else problem


def require_causal(world: World, subject: str, problem: Problem) -> None:
    """Skip a causal problem where the flag has no effect, or is refused: one clause says so."""
    key = (world.target, subject, world.transport)
    if problem.causal and key not in _TAKES_CAUSAL:
        _TAKES_CAUSAL[key] = _takes_causal(world, subject)
    if problem.causal and not _TAKES_CAUSAL[key]:
        raise unittest.SkipTest("it takes no `causal`, for which attention.causal.* fail")


def _takes_causal(world: World, subject: str) -> bool:
    """False where the flag changes nothing, or where what answers without it refuses it."""
    found = []
    with _aside():
        for causal in (False, True):
            asked = AS_THE_EXERCISE.but(causal=causal)
            try:
                found.append(bodies.observe(world, subject, bodies.forward, asked)["O"])
            except NotOffered:
                return True  # which the case that is judged says itself
            except FAILURES:
                return not found
    return not torch.equal(*found)


def require_finite(answer: Answer) -> None:
    """Skip where the answer that another is held against is not finite."""
    if not all(bool(value.isfinite().all()) for value in answer.values()):
        raise unittest.SkipTest("it gives NaN or inf here, for which attention.causal.* fail")


def require_right(
    world: World, subject: str, problem: Problem, *, is_differentiated: bool = True
) -> None:
    """Skip where the problem by itself is answered wrongly: another clause fails for that.

    Args:
        is_differentiated: the gradients count, too, where there are any.
    """
    key = (world.target, subject, world.transport, problem, is_differentiated)
    if key not in _TAKES:
        _TAKES[key] = False
        bodies_tried = BODIES if is_differentiated else BODIES[1:]
        with _aside():
            has_gradients = is_differentiated and offers_backward(world, subject)
            num_offered = len(OUTPUT_AND_GRADIENTS) if has_gradients else 1
            _TAKES[key] = _num_right(world, subject, problem, bodies_tried) == num_offered
    if not _TAKES[key]:
        raise unittest.SkipTest(f"{problem!r} is answered wrongly: see attention.gradients.*")


def require_backward(world: World, subject: str) -> None:
    """Raise NotOffered where the backward is left open, whatever else the subject refuses."""
    if not offers_backward(world, subject):
        raise NotOffered("the backward is left open")


def offers_backward(world: World, subject: str) -> bool:
    """False where the backward of the exercise's sizes raises NotImplementedError."""
    key = (world.target, subject, world.transport, "backward")
    if key not in _TAKES:
        _TAKES[key] = True
        with _aside():
            try:
                bodies.observe(world, subject, bodies.gradients, AS_THE_EXERCISE)
            except NotOffered:
                _TAKES[key] = False
            except FAILURES:
                pass
    return _TAKES[key]


def takes_dtype(world: World, subject: str, dtype: str, *, is_differentiated: bool = False) -> bool:
    """Whether a forward of the exercise's sizes, or its backward, has an answer in that dtype."""
    key = (world.target, subject, world.transport, dtype, is_differentiated)
    body = bodies.gradients if is_differentiated else bodies.forward
    if dtype == "float32":
        return True
    if key not in _TAKES:
        _TAKES[key] = False
        with _aside(), contextlib.suppress(*FAILURES):
            bodies.observe(world, subject, body, AS_THE_EXERCISE.but(dtype=dtype))
            _TAKES[key] = True
    return _TAKES[key]


def _aside() -> contextlib.AbstractContextManager[object]:
    """What is tried first leaves no margin and no words in the case that is judged."""
    return judge.judging(dataclasses.replace(judge.SITUATION.get(), margins=[]))


def _num_right(
    world: World, subject: str, problem: Problem, tried: Sequence[Callable[..., Answer]] = BODIES
) -> int:
    """How many of O, dQ, dK and dV are right, or of O alone; below zero where there is none."""
    for body in tried:
        with contextlib.suppress(*FAILURES):
            seen = bodies.observe(world, subject, body, problem)
            return len(seen) - len(
                rules.faults(seen, problem, names=seen, tf32=is_tf32(world, subject))
            )
    return -1
