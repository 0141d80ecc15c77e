"""Causes: what many failed clauses have in common, said once.

The cause of a failed clause is what the message of its first decisive case shows: the line of the
judged code that raised, the diagnosis of a wrong value, or the line at which ranks were blocked.
Clauses that show the same are one cause. A clause that shows nothing of this kind is a cause of its
own: nothing is guessed. Causes that one known fault explains (see `diagnosis`) are one cause, too,
which names that fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, Cell, Event, Outcome, cells
from spec_tests.rig.report.diagnosis import dictionary, families, is_telling
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
        like: the near-miss that fails the same clauses in the same way, or "".
        family: where none does, the family of faults that the clauses and symptoms speak of, or "".
    """

    text: str
    cells: list[Cell] = field(default_factory=list)
    like: str = ""
    family: str = ""

    @property
    def clauses(self) -> list[str]:
        """Ids of the clauses."""
        return [cell.clause for cell in self.cells]

    @property
    def first(self) -> Cell:
        """The clause to mend first."""
        return self.cells[0]


def causes(events: Sequence[Event], implementation: str) -> list[Cause]:
    """Return the causes of what failed: the lowest level first, then the most frequent."""
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
            cause = Cause(clipped(text))
            found.append(cause)
        cause.cells.append(cell)
        known |= dict.fromkeys(signs, cause)
    passed = {cell.clause for cell in judged if cell.outcome is Outcome.PASSED}
    found = sorted(_named(found, passed), key=lambda cause: -len(cause.cells))
    return sorted(found, key=lambda cause: _level(cause.first))


def _named(found: Sequence[Cause], passed: Collection[str]) -> list[Cause]:
    """Give causes the names of the near-misses that explain them; join those of one name."""
    shown = {cell.clause: _symptom(cell) for cause in found for cell in cause.cells}
    for known in dictionary().explain(shown, passed) if shown else ():
        if not is_telling(known, shown):
            continue
        for cause in found:
            own = {*cause.clauses}
            is_half = 2 * len(own & {*known.clauses}) >= len(own)
            if not cause.like and is_half and own & {*known.alike}:
                cause.like = known.near_miss
    kept: list[Cause] = []
    for cause in sorted(found, key=lambda cause: (_level(cause.first), -len(cause.cells))):
        same = next((each for each in kept if cause.like and each.like == cause.like), None)
        if same is None or any(cell.outcome is Outcome.ERROR for cell in cause.cells):
            kept.append(cause)
        else:
            same.cells = sorted(same.cells + cause.cells, key=_place_in_book)
    for cause in kept:
        likely_first = families().of({clause: shown[clause] for clause in cause.clauses})
        if not cause.like and all(cell.outcome is not Outcome.ERROR for cell in cause.cells):
            cause.family = next(iter(likely_first), "")
    return kept


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
