"""Assertions that diagnose: they look at all ranks and all names, and say what it looks like.

A judge compares what the ranks observed with what is right, loops over ranks and names itself,
and on a difference says: the clause and its sentence; the rank and the name; the difference in
units that mean something; the likely cause; the situation; the line to run it again. The message
is the product of this suite, so it is tested like one (`tests/rig/test_judge.py`).

Observations that a clause cannot read are a finding about the implementation, and no error of the
rig. What a body returns holds what the implementation returned. A clause reads it as the contract
describes it: so many batches, these names, a tensor. Where the implementation returned None or
another type, the clause's own code raises a TypeError or the like. That is the implementation's
fault, as long as the ranks have answered and the rig itself did not raise.
"""

from __future__ import annotations

import contextlib
import reprlib
import traceback
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis.errors import HypothesisException

from spec_tests.rig.judge.evidence import Evidence, of_wrong_tensors
from spec_tests.rig.judge.symptoms import Finding, Hint, explain, gap
from spec_tests.rig.judge.tolerance import Tolerance, exact
from spec_tests.rig.ranks.errors import Blocked, RankRaised, RigError

Tensors = Mapping[str, torch.Tensor | None]


@dataclass
class Situation:
    """Which clause is being judged, on what, and how to run it again."""

    clause: str = "(no clause)"
    sentence: str = ""
    implementation: str = ""
    case: str = ""
    world_size: int = 0
    rerun: str = ""
    source: str = ""
    where: str = ""
    subject: str = ""  # the functions that are judged
    is_learning: bool = False  # the implementation is a skeleton of `new`, as far as it is filled
    given: str = ""  # in words, where a finding brings none of its own: what was raised
    in_words: str = ""  # what `given` says, for a reader who does not know its language
    margins: list[dict[str, float]] = field(default_factory=list)
    observed: Sequence[Any] | None = None  # what the ranks returned last, one entry per rank


_NOWHERE = Situation()
SITUATION: ContextVar[Situation] = ContextVar("situation", default=_NOWHERE)


@contextlib.contextmanager
def judging(situation: Situation) -> Iterator[Situation]:
    """Within the block, violations name `situation` and margins are collected in it."""
    token = SITUATION.set(situation)
    try:
        yield situation
    finally:
        SITUATION.reset(token)


class Violation(AssertionError):
    """A norm is violated. The text is complete: clause, culprit, difference, cause, rerun line.

    `evidence` is what a page draws of it, see the module of that name.
    """

    def __init__(self, text: str, evidence: Evidence | None = None) -> None:
        super().__init__(text)
        self.evidence = evidence or {}


def violated(
    finding: str,
    *,
    likely: str = "",
    detail: str = "",
    given: str = "",
    evidence: Evidence | None = None,
) -> Violation:
    """Build the exception for a finding; raise it."""
    now = SITUATION.get()
    situation = ", ".join(part for part in (given or now.given, now.case) if part)
    lines = [
        f"[{now.clause}]  {now.sentence}",
        finding,
        f"likely: {likely}" if likely else "",
        detail,
        f"given: {situation}, {now.implementation}" if situation else "",
        f"in words: {now.in_words}" if now.in_words else "",
        f"again: {now.rerun}" if now.rerun else "",
        f"why: {now.source} · {now.where}" if now.source else "",
    ]
    return Violation("\n".join(line for line in lines if line), evidence)


def holds(condition: bool, finding: str, *, likely: str = "", given: str = "") -> None:
    """Raise a Violation with `finding` unless `condition`."""
    __tracebackhide__ = True
    if not condition:
        raise violated(finding, likely=likely, given=given)


def tensors(
    observed: Sequence[Tensors],
    expected: Tensors | Sequence[Tensors],
    *,
    quantity: str,
    within: Tolerance | None = None,
    hints: Sequence[Hint] = (),
    given: str = "",
) -> None:
    """Every rank's tensors must equal the expected ones, name by name.

    Args:
        observed: per rank, name to tensor (or None, which only None equals).
        expected: the same for all ranks, or one mapping per rank.
        quantity: what the tensors are, in the message: "mean gradient".
        within: the allowed difference; exact if left out.
        hints: wrong values worth recognising, such as the rank's own local gradient.
        given: the situation in words.

    Raises:
        Violation: if any differs. It describes the first culprit and counts the others.
    """
    __tracebackhide__ = True
    tolerance = within or exact()
    per_rank = [expected] * len(observed) if isinstance(expected, Mapping) else list(expected)
    findings: list[Finding] = []
    for rank, (seen, wanted) in enumerate(zip(observed, per_rank, strict=True)):
        _check_names(rank, seen, wanted, quantity, given)
        for name, tensor in wanted.items():
            finding = _compare(rank, name, seen[name], tensor, tolerance)
            if finding is not None:
                findings.append(finding)
    if findings:
        found = _describe(findings, observed, quantity, tolerance, hints, given)
        found.evidence = of_wrong_tensors(findings, per_rank)
        raise found


def same_on_all_ranks(observed: Sequence[Tensors], *, quantity: str, given: str = "") -> None:
    """All ranks must hold equal bits.

    Raises:
        Violation: naming the first rank that differs from rank 0.
    """
    __tracebackhide__ = True
    for rank, seen in enumerate(observed[1:], start=1):
        _check_names(rank, seen, observed[0], quantity, given)
        for name, reference in observed[0].items():
            finding = _compare(rank, name, seen[name], reference, exact())
            if finding is not None:
                alike = [observed[0]] * (rank + 1)  # those before this one hold what rank 0 holds
                raise violated(
                    f"rank {rank}, {name!r}: its {quantity} differs from rank 0's "
                    f"({finding.difference()})",
                    likely=finding.missing()
                    or "the ranks did not do the same thing: one scaled, clipped, skipped or "
                    "synchronised on its own",
                    given=given,
                    evidence=of_wrong_tensors([finding], alike),
                )


def equal(observed: Sequence[Any], expected: Any, *, quantity: str, given: str = "") -> None:
    """Every rank's plain value must equal `expected`.

    Raises:
        Violation: naming the ranks, what they have, and what was expected.
    """
    __tracebackhide__ = True
    wrong = {rank: value for rank, value in enumerate(observed) if value != expected}
    if wrong:
        rank, value = next(iter(wrong.items()))
        others = f"   (ranks {sorted(wrong)} are wrong)" if len(wrong) > 1 else ""
        wanted = f"{quantity} {expected!r}" if expected not in ("", []) else f"no {quantity}"
        raise violated(f"rank {rank}: expected {wanted}, got {value!r}{others}", given=given)


def _check_names(rank: int, seen: Tensors, wanted: Tensors, quantity: str, given: str) -> None:
    if seen.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - seen.keys()), sorted(seen.keys() - wanted.keys())
        raise violated(
            f"rank {rank}: {quantity} for other names than expected: missing {missing}, "
            f"unexpected {extra}",
            given=given,
        )


def _compare(
    rank: int,
    name: str,
    seen: torch.Tensor | None,
    wanted: torch.Tensor | None,
    tolerance: Tolerance,
) -> Finding | None:
    """None if they agree. Records the margin either way."""
    if seen is None and wanted is None:
        return None
    if seen is not None and not isinstance(seen, torch.Tensor):
        raise violated(
            f"rank {rank}, {name!r}: expected a tensor, got {type(seen).__name__}: {seen!r:.80}"
        )
    if seen is None or wanted is None or seen.shape != wanted.shape or seen.dtype != wanted.dtype:
        return Finding(rank, name, seen, wanted, float("inf"), 0.0)
    allowed = tolerance.bound(wanted)
    if torch.equal(seen, wanted):
        error = 0.0
    else:
        error = float(gap(seen, wanted).max())
    if tolerance.relative > 0.0:
        SITUATION.get().margins.append(
            {"tolerance": allowed, "error": error, "ratio": error / allowed}
        )
    # Equal values with unequal bits are -0.0 and 0.0: no norm here is about the sign of zero.
    return Finding(rank, name, seen, wanted, error, allowed) if error > allowed else None


def _describe(
    findings: Sequence[Finding],
    observed: Sequence[Tensors],
    quantity: str,
    tolerance: Tolerance,
    hints: Sequence[Hint],
    given: str,
) -> Violation:
    # One number is some multiple of any other, and so tells less than a tensor of several.
    of_one_rank = [finding for finding in findings if finding.rank == findings[0].rank]
    first = next((f for f in of_one_rank if f.has_several()), findings[0])
    ranks = sorted({finding.rank for finding in findings})
    names = sorted({finding.name for finding in findings})
    is_mean = "mean" in quantity and "group" not in quantity
    cause = explain(first, hints, world_size=len(observed), all_of=findings, is_mean=is_mean)
    scope = f"{len(names)} of {len(observed[0])} names wrong on rank{'s' * (len(ranks) > 1)} "
    scope += f"{', '.join(map(str, ranks))} of {len(observed)}"
    if len(ranks) == len(observed) > 1 and _ranks_agree(observed, first.name):
        scope += "; the ranks agree with each other"
    size = f"{first.difference()}; allowed {first.allowed:.1e} ({tolerance.reason})\n"
    return violated(
        f"rank {first.rank}, {first.name!r} {first.shape()}: expected the {quantity}, "
        f"{first.got(cause)}",
        likely=cause.text if cause else "",
        detail=("" if first.missing() else size) + scope,
        given=given,
    )


def _ranks_agree(observed: Sequence[Tensors], name: str) -> bool:
    first, *others = (seen[name] for seen in observed)
    if first is None:
        return all(other is None for other in others)
    return all(other is not None and torch.equal(first, other) for other in others)


# ---------------------------------------------------------------- what a clause cannot read

_SUITE = Path(__file__).parents[2]
_WORLD = str(Path(__file__).parents[1] / "ranks/world.py")
# Findings and outcomes of their own, and what the machine or the run itself is at fault for.
_OTHERS = (
    *(AssertionError, RankRaised, RigError, Blocked, unittest.SkipTest, HypothesisException),
    *(OSError, MemoryError, ImportError, NameError),
)


@contextlib.contextmanager
def unreadable_is_a_finding() -> Iterator[None]:
    """Run a clause's test in the block: raise a Violation where it cannot read what ranks returned.

    Raises:
        Violation: in place of an unexpected exception after the ranks have answered.
    """
    __tracebackhide__ = True
    try:
        yield
    except _OTHERS:
        raise
    except Exception as error:
        observed = SITUATION.get().observed
        frames = traceback.extract_tb(error.__traceback__)
        if observed is None or any(frame.filename == _WORLD for frame in frames):
            raise
        found = _unreadable(error, frames, observed)
        for note in getattr(error, "__notes__", ()):  # the values that hypothesis drew
            found.add_note(note)
        raise found from error


def _unreadable(
    error: Exception, frames: traceback.StackSummary, observed: Sequence[Any]
) -> Violation:
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_SUITE)]
    where = own[-1] if own else frames[-1]
    lines = [f"rank {rank} returned {_brief(value)}" for rank, value in enumerate(observed)]
    alike = len({line.partition("returned")[2] for line in lines}) == 1 < len(lines)
    return violated(
        "expected observations as the contract describes them, got some that this clause cannot "
        f"read: {type(error).__name__}: {error}",
        likely="a function returned None, another type, or fewer values or other names than the "
        "contract says",
        detail="\n".join(
            [
                *([f"every rank returned {_brief(observed[0])}"] if alike else lines),
                f"read in {Path(where.filename).name}:{where.lineno}: {where.line}",
            ]
        ),
    )


class _Brief(reprlib.Repr):
    """A line per observation: of a tensor its shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 6, 4, 4
        self.maxstring = self.maxother = 120

    def repr_Tensor(self, tensor: torch.Tensor, level: int) -> str:
        return f"<tensor {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}>"


def _brief(value: object) -> str:
    return _Brief().repr(value)
