"""The shapes that clauses of this chapter have: a problem, and what its answer is held against.

as_fitted(world, subject, problem, ALL)          the definition, in sizes that the subject takes
asked(world, subject, problem, names, *changes)  answers for changed inputs, for `near` or bits
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.problem import (
    ALL,
    AS_THE_EXERCISE,
    FITS,
    GRADIENTS,
    OUTPUT_AND_GRADIENTS,
    RAGGED,
    Answer,
    Change,
    Problem,
    dense,
    inputs,
    same,
)
from spec_tests.rig import judge
from spec_tests.rig.ranks.errors import NotOffered, RankDied, RankHung
from spec_tests.rig.ranks.world import World

# A failure of what is only tried says nothing: the case that is judged then meets the same.
FAILURES = (Exception, RankDied, RankHung)
BOTH = {"full": False, "causal": True}
"""By name, the masks that most clauses are judged with."""
TRIED = (OUTPUT_AND_GRADIENTS, ("O",))

_Found = TypeVar("_Found")


def varied(base: Problem, **axes: Iterable[Any] | Mapping[str, Any]) -> dict[str, Problem]:
    """Return the problem with every combination of these fields, by the names of their values."""
    named = [v if isinstance(v, Mapping) else {str(one): one for one in v} for v in axes.values()]
    return {
        "-".join(names): base.but(
            **{field: each[name] for field, each, name in zip(axes, named, names, strict=True)}
        )
        for names in itertools.product(*named)
    }


def problems(cases: Mapping[str, Problem]) -> Any:
    """Parametrise a clause by problems, each with the name of its case."""
    return pytest.mark.parametrize("problem", [*cases.values()], ids=[*cases])


def asked(
    world: World, subject: str, problem: Problem, names: Sequence[str], *changes: Change
) -> list[Answer]:
    """What is named of the answer, for the inputs after each of these changes, see `offered`."""
    names = offered(world, subject, names)
    found = bodies.observe(world, subject, bodies.answers, problem, names, *changes)
    return [_Offered(answer) for answer in found]


class _Offered(dict[str, torch.Tensor]):
    """An answer that raises NotOffered for a name that it lacks."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise NotOffered(f"{name} is not offered")


def as_defined(
    world: World,
    subject: str,
    problem: Problem,
    names: Sequence[str] = ALL,
    *,
    tf32: bool | None = None,
) -> None:
    """What the subject answers must be the definition's: what is named, or all.

    Args:
        tf32: whether products of float32 may have eleven bits; None asks `is_tf32`.

    Raises:
        Violation: it names the tensors, the broken rule and what the values look like.
        NotOffered: the backward is left open, and what the clause asks of the forward holds.
    """
    __tracebackhide__ = True
    names = offered(world, subject, names)
    of_forward = tuple(name for name in names if name not in GRADIENTS)
    is_open = of_forward != names and not offers(world, subject, *OUTPUT_AND_GRADIENTS)
    judged = of_forward if is_open else names  # the forward is judged all the same
    parts = [judged] if judged else []
    if "L" in judged and judged != of_forward:  # both forms of a call
        parts = [tuple(name for name in judged if name != "L"), ("L",)]
    answers = [asked(world, subject, problem, part, same)[0] for part in parts]
    tf32 = is_tf32(world, subject) if tf32 is None else tf32
    seen = {name: value for answer in answers for name, value in answer.items()}
    rules.close(seen, problem, names=judged, tf32=tf32)
    if is_open:
        raise NotOffered("the backward is left open")


def as_fitted(
    world: World,
    subject: str,
    problem: Problem,
    names: Sequence[str] = ALL,
    *,
    tf32: bool | None = None,
    fits: Sequence[str] = FITS,
    is_about_dtype: bool = False,
) -> None:
    """`as_defined`, in sizes that the subject takes, see `fitting`."""
    __tracebackhide__ = True
    problem = fitting(world, subject, problem, fits=fits, is_about_dtype=is_about_dtype)
    as_defined(world, subject, problem, names, tf32=tf32)


def as_changed(
    world: World, subject: str, problem: Problem, change: Change, names: Sequence[str], what: str
) -> None:
    """The answer for changed inputs must be as near to its definition as two right answers are."""
    __tracebackhide__ = True
    problem = fitting(world, subject, problem)
    (seen,) = asked(world, subject, problem, names, change)
    found = dense(problem, change(inputs(problem)), torch.float64, scale_on_keys=False)
    wanted = {name: found[name].float() for name in names}
    near(world, subject, seen, wanted, what)


def close(world: World, subject: str, seen: Answer, problem: Problem, *names: str) -> None:
    """Every named tensor must keep the rules of its dtype, see `rules.close`."""
    __tracebackhide__ = True
    names = offered(world, subject, names or ALL)
    rules.close(seen, problem, names=names, tf32=is_tf32(world, subject))


def near(
    world: World, subject: str, seen: Answer, wanted: Answer, what: str = "", likely: str = ""
) -> None:
    """Two answers that the definition says are equal must be as near as two right ones are.

    Args:
        what: what was changed between the two, in words.
    """
    __tracebackhide__ = True
    tf32 = is_tf32(world, subject)
    given = ", ".join(filter(None, (judge.SITUATION.get().given, what)))
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    judge.equal([{n: tuple(seen[n].shape) for n in wanted}], shapes, quantity="shapes", given=given)
    bounds = {name: rules.apart(name, seen[name], wanted[name], tf32=tf32) for name in wanted}
    for bound in bounds.values():
        rules.note(bound)
    wrong = [f"{n} {shapes[n]}: {bound}" for n, bound in bounds.items() if not bound.is_kept]
    said = "expected two ways to say the same to agree, got\n" + "\n".join(wrong)
    judge.holds(not wrong, said, likely=likely, given=given)


# ----------------------------------------------- what is tried before a case, so that it says most


def tried(probe: Callable[..., _Found]) -> Callable[..., _Found]:
    """Ask an implementation once; no margin and no words remain in the case that is judged."""
    known: dict[tuple[object, ...], _Found] = {}

    @functools.wraps(probe)
    def ask(world: World, subject: str, *args: object) -> _Found:
        key = (world.target, subject, world.transport, *args)
        if key not in known:
            with judge.judging(dataclasses.replace(judge.SITUATION.get(), margins=[])):
                known[key] = probe(world, subject, *args)
        return known[key]

    return ask


def is_tf32(world: World, subject: str) -> bool:
    """Whether products of float32 may have the eleven bits of TF32 and float16.

    On a GPU they may: level production asks for more. Elsewhere they may in what forms no others:
    the exercise accepts that, and `attention.forward.float32-products` fails for it, alone.
    """
    return world.transport == "cuda" or rounds_products(world, subject)


@tried
def rounds_products(world: World, subject: str) -> bool:
    """True where the exercise's sizes have the rounding of eleven bits, and not that of float32."""
    seen = _answered(world, subject, AS_THE_EXERCISE)
    of_24, of_11 = (
        rules.faults(seen, AS_THE_EXERCISE, names=seen, tf32=tf32) for tf32 in (False, True)
    )
    return bool(of_24) and not of_11


@tried
def takes_causal(world: World, subject: str) -> bool:
    """False where the flag changes nothing, or where what answers without it refuses it."""
    found: list[Answer] = []
    for causal in (False, True):
        try:
            found += asked(world, subject, AS_THE_EXERCISE.but(causal=causal), ("O",), same)
        except NotOffered:
            return True  # which the case that is judged says itself
        except FAILURES:
            return not found
    return not torch.equal(*(each["O"] for each in found))


@tried
def offers(world: World, subject: str, *names: str) -> bool:
    """False where what is named is NotImplementedError in the exercise's sizes, causal or not."""
    for problem in (AS_THE_EXERCISE, AS_THE_EXERCISE.but(causal=True)):
        try:
            bodies.observe(world, subject, bodies.answers, problem, names, same)
        except NotOffered:
            continue
        except FAILURES:
            pass
        return True
    return False


def offered(world: World, subject: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, without L where that is not offered and others are left to be judged."""
    others = tuple(name for name in names if name != "L")
    is_left_out = "L" in names and others and not offers(world, subject, "L")
    return others if is_left_out else tuple(names)


@tried
def takes_dtype(world: World, subject: str, dtype: str, names: Sequence[str] = ("O",)) -> bool:
    """Whether a call of the exercise's sizes has such an answer in that dtype."""
    with contextlib.suppress(*FAILURES):
        if dtype != "float32":
            asked(world, subject, AS_THE_EXERCISE.but(dtype=dtype), names, same)
        return True
    return False


@tried
def num_right(
    world: World, subject: str, problem: Problem, tried: tuple[Sequence[str], ...] = TRIED
) -> int:
    """How many of O, dQ, dK and dV are right, or of O alone; below zero where there is none."""
    seen = _answered(world, subject, problem, tried)
    tf32 = is_tf32(world, subject)
    return len(seen) - len(rules.faults(seen, problem, names=seen, tf32=tf32)) if seen else -1


@tried
def best_fit(world: World, subject: str, causal: bool | None, fits: Sequence[str]) -> str:
    """The sizes, of `fits`, in which most is right."""
    right: dict[str, int] = {}
    for fit in fits:
        right[fit] = num_right(world, subject, RAGGED.but(causal=causal).fitted(fit))
        if right[fit] == len(OUTPUT_AND_GRADIENTS):
            break
    if max(right.values()) < 0:  # none is answered: the strictest, which most kernels take
        return fits[-1]
    return max(right, key=lambda fit: right[fit])


def _answered(
    world: World, subject: str, problem: Problem, tried: tuple[Sequence[str], ...] = TRIED
) -> Answer:
    for names in tried:
        with contextlib.suppress(*FAILURES):
            return asked(world, subject, problem, names, same)[0]
    return {}


# ------------------------------------------------ what another clause fails for, and this one not


def fitting(
    world: World,
    subject: str,
    problem: Problem,
    *,
    fits: Sequence[str] = FITS,
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
        _raise_what_is_not_offered(world, subject, AS_THE_EXERCISE.but(dtype=problem.dtype))
        raise unittest.SkipTest(
            f"it takes no {problem.dtype}, for which attention.*.half-precision fail"
        )
    fit = best_fit(world, subject, problem.causal, fits)
    return problem.fitted(fit) if fit else problem


def require_causal(world: World, subject: str, problem: Problem) -> None:
    """Skip a causal problem where the flag has no effect, or is refused: one clause says so."""
    if problem.causal and not takes_causal(world, subject):
        raise unittest.SkipTest("it takes no `causal`, for which attention.causal.* fail")


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
    has_gradients = is_differentiated and offers(world, subject, *OUTPUT_AND_GRADIENTS)
    found = num_right(world, subject, problem, TRIED if is_differentiated else TRIED[1:])
    if found < 0:
        _raise_what_is_not_offered(world, subject, problem)
    if found != (len(OUTPUT_AND_GRADIENTS) if has_gradients else 1):
        raise unittest.SkipTest(f"{problem!r} is answered wrongly: see attention.gradients.*")


def _raise_what_is_not_offered(world: World, subject: str, problem: Problem) -> None:
    try:
        asked(world, subject, problem, ("O",), same)
    except (NotOffered, unittest.SkipTest):  # nothing fails for it
        raise
    except FAILURES:
        pass


def require_backward(world: World, subject: str) -> None:
    """Raise NotOffered where the backward is left open, whatever else the subject refuses."""
    if not offers(world, subject, *OUTPUT_AND_GRADIENTS):
        raise NotOffered("the backward is left open")
