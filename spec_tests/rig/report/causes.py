"""Causes: what many failed clauses have in common, said once.

The cause of a failed clause is what the message of its first decisive case shows: the line of the
judged code that raised, the diagnosis of a wrong value, or the line at which ranks were blocked.
Clauses that show the same are one cause. A clause that shows nothing of this kind is a cause of its
own: nothing is guessed. Causes that one known fault explains (see `diagnosis`) are one cause, too,
which names that fault; and one without a diagnosis joins another of its family, unless that raised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, Cell, Event, Outcome, cells
from spec_tests.rig.report.diagnosis import Diagnosis, dictionary, families, is_telling
from spec_tests.rig.report.symptom import RAISED, headline_of, likely, symptom
from spec_tests.target import PACKAGE_ROOT

FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_JUDGED = ("impostors", "plain", "rig_tests")  # folders of the suite that can be judged


@dataclass
class Cause:
    """One cause of failed clauses of one implementation.

    Attributes:
        text: what it is, in a line.
        cells: the failed clauses that show it, the lowest level first.
        kind: what `text` is: "raised", "likely" (a diagnosis), "hang", "died", or "" (a finding).
        known: the known fault that explains them, if one does.
        family: where none has a name, the family that the clauses and symptoms speak of, or "".
    """

    text: str
    cells: list[Cell] = field(default_factory=list)
    kind: str = ""
    known: Diagnosis | None = None
    family: str = ""

    @property
    def like(self) -> str:
        """The near-miss that fails the same clauses in the same way, or ""."""
        return self.known.near_miss if self.known else ""

    @property
    def clauses(self) -> list[str]:
        """Ids of the clauses."""
        return [cell.clause for cell in self.cells]

    @property
    def first(self) -> Cell:
        """The clause to mend first."""
        return self.cells[0]


def causes(
    events: Sequence[Event], implementation: str, *, without: Collection[str] = ()
) -> list[Cause]:
    """Return the causes of what failed: the lowest level first, then the most frequent.

    Args:
        without: near-misses that are taken to be unknown.
    """
    judged = cells(events, implementation)
    failed = [
        cell
        for cell in judged
        if cell.outcome in (REFUTED | BROKEN) - {Outcome.BLOCKED, Outcome.UNEXPECTED_PASS}
    ]
    found: list[Cause] = []
    known: dict[tuple[str, ...], Cause] = {}
    for cell in sorted(failed, key=_place_in_book):
        text, *signs = _shown(cell)
        cause = next((known[sign] for sign in signs if sign in known), None)
        if cause is None:
            stopped = cell.outcome in (Outcome.HANG, Outcome.DIED)
            cause = Cause(clipped(text), kind=str(cell.outcome) if stopped else signs[0][0])
            found.append(cause)
        cause.cells.append(cell)
        known |= dict.fromkeys(signs, cause)
    passed = {cell.clause for cell in judged if cell.outcome is Outcome.PASSED}
    found = sorted(_named(found, passed, without), key=lambda cause: -len(cause.cells))
    return sorted(found, key=lambda cause: _level(cause.first))


def _named(
    found: Sequence[Cause], passed: Collection[str], without: Collection[str]
) -> list[Cause]:
    """Name causes by the near-misses that explain them; join those of one name or kind."""
    shown = {cell.clause: _symptom(cell) for cause in found for cell in cause.cells}
    explained = dictionary().explain(shown, passed, without=without) if shown else []
    telling = [known for known in explained if is_telling(known, shown)]
    for cause in found:
        own = {*cause.clauses}
        covering = [known for known in telling if 2 * len(own & known.signature) >= len(own)]
        alike = [known for known in covering if own & {*known.alike}]
        other = covering if cause.kind in ("", "likely") else []  # an error, a hang say more
        cause.known = next(iter(alike + other), None)
    kept: list[Cause] = []
    for cause in sorted(found, key=lambda cause: (_level(cause.first), -len(cause.cells))):
        same = next((each for each in kept if each.known is cause.known is not None), None)
        _add(cause, kept, None if _is_of_the_rig(cause) else same)
    joined: list[Cause] = []
    for cause in kept:
        if not cause.like and not _is_of_the_rig(cause):
            own_shown = {clause: shown[clause] for clause in cause.clauses}
            cause.family = next(iter(families().of(own_shown, without=without)), "")
        _add(cause, joined, next((each for each in joined if _is_of_one_kind(each, cause)), None))
    return joined


def _add(cause: Cause, to: list[Cause], same: Cause | None) -> None:
    if same is None:
        to.append(cause)
        return
    # The words are of the finding that is shown, but a diagnosis says more than what was found.
    first = min(same, cause, key=lambda each: (not each.kind, _place_in_book(each.first)))
    same.text, same.kind = first.text, first.kind
    same.cells = sorted(same.cells + cause.cells, key=_place_in_book)


def _is_of_the_rig(cause: Cause) -> bool:
    return any(cell.outcome is Outcome.ERROR for cell in cause.cells)


def _is_of_one_kind(one: Cause, other: Cause) -> bool:
    """Whether causes of a chapter have one family, and one shows nothing that tells it apart."""
    kinds = {one.kind, other.kind}
    chapters = {clause.partition(".")[0] for clause in one.clauses + other.clauses}
    is_one = one.family == other.family != "" and len(chapters) == 1
    return is_one and "" in kinds and kinds <= {"", "likely"}


def _symptom(cell: Cell) -> str:
    first = cell.decisive_cases[0]
    return symptom(str(cell.outcome), first["message"])


def _level(cell: Cell) -> tuple[bool, int]:
    """Advice comes last."""
    return cell.strength != "MUST", LEVELS.index(cell.level)


def _place_in_book(cell: Cell) -> tuple[bool, int, str, int]:
    """Lowest level first, then as the chapters are read: what is simple stands before the rest."""
    first = cell.cases[0]
    return *_level(cell), first.get("node", "").partition("::")[0], first.get("line", 0)


def _shown(cell: Cell) -> tuple[Any, ...]:
    """Return the cause in words, and what it has in common with others of the same cause."""
    message = cell.decisive_cases[0]["message"]
    headline = headline_of(message)
    place = _place(message)
    raised = RAISED.match(headline)
    if raised:  # the same words anywhere, or the same kind of error at one line
        words, kind = raised[1], raised[1].partition(":")[0]
        if not place:
            return words, ("raised", words)
        return f"{place} raises {words}", ("raised", words), ("raised", kind, place)
    stopped = cell.outcome in (Outcome.HANG, Outcome.DIED) and place
    at = [(str(cell.outcome), place)] if stopped else []
    if diagnosis := likely(message):
        return diagnosis, ("likely", diagnosis), *at
    if stopped:
        what = "ranks are blocked at" if cell.outcome is Outcome.HANG else "a rank ends at"
        return f"{what} {place}", *at
    return headline or f"{cell.outcome}: {cell.clause}", ("", cell.clause)


def _place(message: str) -> str:
    """`file.py:12`, the innermost line of a traceback or stack that is the implementation's own."""
    own = [f"{Path(file).name}:{line}" for file, line in FRAME.findall(message) if is_own(file)]
    return own[-1] if own else ""


def is_own(file: str) -> bool:
    """False for lines of the suite, of Python and of installed packages."""
    _, suite, inside = file.rpartition("/spec_tests/")
    if suite and (PACKAGE_ROOT / inside).is_file():
        return inside.partition("/")[0] in _JUDGED
    return not re.search(r"site-packages|/lib/python3|^<", file)


def clipped(line: str, limit: int = 110) -> str:
    """Return a line with at most `limit` characters."""
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
