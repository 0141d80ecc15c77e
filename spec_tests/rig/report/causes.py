"""Causes: what failed clauses have in common, said once.

The cause of a failed clause is what the message of its first decisive case shows: the line of the
judged code that raised, the diagnosis of a wrong value, or the line at which ranks were blocked.
Where that line only called a model of the suite, which raised, the words of the error count, too.
What one function fails with the same symptom is one cause; nothing else is joined, and two
functions never share a cause. A diagnosis that names several causes, as two ranks often leave it,
belongs to the one of them that another clause names alone. Findings without a diagnosis are joined
where they say the same of other tensors, with other numbers; they explain nothing
(`Cause.is_explained`).

Of which kind the fault of a function is, all that the function fails says together (`diagnosis`).
The first of its causes that has a clause of that kind says so, but for what raised or differs from
run to run: there the error, or the difference, is all that is known.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, Cell, Event, Outcome, results
from spec_tests.rig.ranks.errors import DIFFERS
from spec_tests.rig.report.diagnosis import FEW_JUDGED, dictionary, families, family_of
from spec_tests.rig.report.symptom import RAISED, headline_of, likely, symptom
from spec_tests.rig.target import PACKAGE_ROOT

FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_OF_ONE_RUN = re.compile(r"'[^']*'|\([^()]*\)|\[[^\[\]]*\]|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""Names of tensors, shapes, lists and numbers."""
_LAUNCHED = re.compile(r", launched at (\S+:\d+)")
_FAILED = (REFUTED | BROKEN) - {Outcome.BLOCKED, Outcome.UNEXPECTED_PASS}
_AROUND, _MAX_COLUMNS = 2, 120  # of the lines that are shown of the judged code
_JUDGED = ("museum", "plain", "tests")  # folders of the suite that can be judged


@dataclass
class Cause:
    """One cause of failed clauses of one function of an implementation.

    Attributes:
        text: what it is, in a line.
        function: what is judged; "" where the log does not say.
        kind: what `text` is: "raised", "likely" (a diagnosis), "differs" (from run to run), "hang",
            "died", "error" (of the rig), or "" (a finding).
        cells: the failed clauses that show it, the lowest level first; of each this function's
            cases alone.
        families: of which kind the function's fault is, or of which two; none where that is not
            certain, or where another of its causes says so.
        like: the near-miss that fails the same clauses in the same way, or "".
    """

    text: str
    function: str
    kind: str
    cells: list[Cell] = field(default_factory=list)
    families: tuple[str, ...] = ()
    like: str = ""

    @property
    def title(self) -> str:
        """What it is, and of which function."""
        return f"{self.function}: {self.text}" if self.function else self.text

    @property
    def is_explained(self) -> bool:
        """Whether something is known beside the finding."""
        return bool(self.kind or self.families or self.like)

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
    """Return the causes of what failed: the lowest level, what is known, the most frequent first.

    Args:
        without: near-misses that are taken to be unknown.
    """
    judged = _by_function(events, implementation)
    found: list[Cause] = []
    known: dict[tuple[str, ...], Cause] = {}
    failed = (cell for cell in judged if cell.outcome in _FAILED)
    for cell in sorted(failed, key=_place_in_book):
        function, (text, *shown) = _function(cell), _shown(cell)
        signs = [(function, *sign) for sign in shown]
        cause = next((known[sign] for sign in signs if sign in known), None)
        if cause is None:
            stopped = cell.outcome in (Outcome.HANG, Outcome.DIED, Outcome.ERROR)
            kind = str(cell.outcome) if stopped else shown[0][0]
            cause = Cause(clipped(text), function, kind)
            found.append(cause)
        cause.cells.append(cell)
        known |= dict.fromkeys(signs, cause)
    found = _without_ambiguous(found)
    found.sort(key=lambda cause: (_level(cause.first), not cause.kind, -len(cause.cells)))
    for function in dict.fromkeys(cause.function for cause in found):
        own = [cause for cause in found if cause.function == function]
        held = (cell for cell in judged if cell.outcome is Outcome.PASSED)
        passed = {cell.clause for cell in held if _function(cell) == function}
        _name(own, passed, without)
    return found


_OR = re.compile(r"[,;] or ")


def _without_ambiguous(found: Sequence[Cause]) -> list[Cause]:
    """Join each diagnosis of several causes to the one of them that stands alone, if one does."""
    alone = {(c.function, _OF_ONE_RUN.sub("", c.text)): c for c in found if c.kind == "likely"}
    kept = []
    for cause in found:
        each = _OR.split(_OF_ONE_RUN.sub("", cause.text))
        certain = [alone[cause.function, w] for w in each if (cause.function, w) in alone]
        if cause.kind == "likely" and len(certain) == 1 and certain[0] is not cause:
            certain[0].cells = sorted(certain[0].cells + cause.cells, key=_place_in_book)
        else:
            kept.append(cause)
    return kept


def _by_function(events: Sequence[Event], implementation: str) -> list[Cell]:
    """What each clause came to, apart for each function that it judges."""
    grouped: dict[tuple[str, str], list[Event]] = {}
    for event in results(events, implementation):
        grouped.setdefault((event["clause"], event.get("subject", "")), []).append(event)
    return [
        Cell(
            clause,
            implementation,
            cases[0]["strength"],
            cases[0]["level"],
            tuple(sorted(cases, key=lambda case: not _differs(case["message"]))),
        )
        for (clause, _), cases in grouped.items()
    ]


def _differs(message: str) -> bool:
    """Whether the case differs from run to run: its other values say nothing."""
    return headline_of(message).startswith(DIFFERS.partition(":")[0])


def _function(cell: Cell) -> str:
    function: str = cell.cases[0].get("subject", "")
    return function


_SAYS_ALL = ("raised", "differs", "error")
"""Kinds of causes beside which nothing else is known."""


def _name(own: Sequence[Cause], passed: Collection[str], without: Collection[str]) -> None:
    """Say of which kind the fault of a function is, in the first cause that speaks of it.

    A function may have several faults. A family of which the clauses of no open cause speak is told
    with the other one of two, or not at all.
    """
    open_ones = [cause for cause in own if cause.kind not in _SAYS_ALL]
    each = [{cell.clause: _symptom(cell) for cell in cause.cells} for cause in open_ones]
    shown = {clause: symptom for of_one in each for clause, symptom in of_one.items()}
    if not shown or len(shown) + len(passed) < FEW_JUDGED:
        return
    kinds = families()
    named = kinds.named(shown, without=without)
    at = [
        next((c for c, s in zip(open_ones, each, strict=True) if kinds.is_spoken_of(f, s)), None)
        for f in named
    ]
    first = next(filter(None, at), None)
    if first is None:
        return
    for family, cause in zip(named, at, strict=True):
        (cause or first).families += (family,)
    like = dictionary().like(shown, passed, without=without) if len(open_ones) == len(own) else ""
    first.like = like if named == (family_of().get(like),) else ""


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
    if _differs(message):
        return headline, ("differs",)
    place = _place(message)
    raised = RAISED.match(headline)
    if raised:  # the same words anywhere, or the same kind of error at one line
        words, kind = raised[1], raised[1].partition(":")[0]
        if not place:  # of work that nobody waited for it is known where it was launched
            launched = _LAUNCHED.search(words)
            signs: tuple[Any, ...] = (("raised", kind, launched[1]),) if launched else ()
            return words, ("raised", words), *signs
        if _is_in_a_model(message):
            alike = _OF_ONE_RUN.sub("", words)
            text = f"a module that {place} calls raises {words}"
            return text, ("raised", words), ("raised", alike, place)
        return f"{place} raises {words}", ("raised", words), ("raised", kind, place)
    stopped = cell.outcome in (Outcome.HANG, Outcome.DIED) and place
    at = [(str(cell.outcome), place)] if stopped else []
    if diagnosis := likely(message):
        return diagnosis, ("likely", _OF_ONE_RUN.sub("", diagnosis)), *at
    if stopped:
        what = "ranks are blocked at" if cell.outcome is Outcome.HANG else "a rank ends at"
        return f"{what} {place}", *at
    seen = _symptom(cell)
    sign = seen if seen.startswith(("more: ", "less: ")) else _OF_ONE_RUN.sub("", headline)
    return headline or f"{cell.outcome}: {cell.clause}", ("", sign or cell.clause)


def _place(message: str) -> str:
    """`file.py:12`, the implementation's own innermost line of a traceback or stack."""
    file, line = innermost(message)
    return f"{Path(file).name}:{line}" if file else ""


def innermost(message: str) -> tuple[str, int]:
    """Return file and line of the innermost frame that is the implementation's own, or "" and 0.

    Of an error that other code made of one below it, such as Triton's interpreter of an error in a
    kernel, it is the frame of that one.
    """
    before, chained, _ = message.rpartition("\nThe above exception was the direct cause")
    frames = FRAME.findall(message)
    is_foreign = bool(frames) and not is_own(frames[-1][0])
    below = FRAME.findall(before) if chained and is_foreign else []
    for found in (below, frames):
        if own := [(file, int(line)) for file, line in found if is_own(file)]:
            return own[-1]
    return "", 0


def source_of(message: str) -> dict[str, Any]:
    """Return the lines around the innermost own line of a traceback or stack in a message.

    Returns:
        {"file": its name, "line": 12, "first": 10, "lines": five at most}; nothing where the
        message has no such line, or it cannot be read. It is read when the log is written: when a
        page is opened, the file may have changed.
    """
    file, line = innermost(message)
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = max(1, line - _AROUND)
    near = [each.rstrip() for each in lines[first - 1 : line + _AROUND]]
    shown = [s if len(s) <= _MAX_COLUMNS else f"{s[: _MAX_COLUMNS - 1]}…" for s in near]
    if line > len(lines):
        return {}
    return {"file": path.name, "line": line, "first": first, "lines": shown}


def _is_in_a_model(message: str) -> bool:
    """Whether the implementation's innermost line called code of a model that the suite made."""
    files = [file for file, _ in FRAME.findall(message)]
    below = itertools.takewhile(lambda file: not is_own(file), reversed(files))
    inside = [file.rpartition("/spec_tests/")[2] for file in below if "/spec_tests/" in file]
    return any(file == "rig/toys.py" or not file.startswith("rig/") for file in inside)


def is_own(file: str) -> bool:
    """False for lines of the suite, of Python and of installed packages."""
    _, suite, inside = file.rpartition("/spec_tests/")
    if suite and (PACKAGE_ROOT / inside).is_file():
        return inside.partition("/")[0] in _JUDGED
    return not re.search(r"site-packages|/lib/python3|^<", file)


def clipped(line: str, limit: int = 110) -> str:
    """Return a line with at most `limit` characters."""
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
