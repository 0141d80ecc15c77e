"""What one case can come to, how cases make a cell, and how cells make the exit status.

Three steps, each a pure function over events of the log:

1. A *case* (one clause, one implementation, one situation) has exactly one `Outcome`. Outcomes are
   never merged: a hang is not a failure, "not offered" is not "skipped".
2. A *cell* (one clause, one implementation) is the worst of its cases. What was not offered or not
   here says nothing, so it hides neither a pass nor a failure beside it.
3. The *exit status* is 0 when every MUST clause at or below the level passes, or fails as declared,
   for what each implementation offers; 1 when one does not; 2 when the run itself is broken. A
   broken run is 2 whatever else it found, for then what it did not find proves nothing.

SHOULD and MAY clauses are shown and counted and never decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Event = dict[str, Any]
"""One line of the log: a flat dict of JSON types with the key "event"."""

LEVELS = ("course", "correct", "production")
"""What the exercises ask, what the name promises, what PyTorch offers beyond. Cumulative."""


class Strength(StrEnum):
    """MUST decides; SHOULD and MAY advise."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


def is_within(level: str, limit: str) -> bool:
    """Whether a clause of `level` is owed by who is held to `limit`."""
    return LEVELS.index(level) <= LEVELS.index(limit)


class Outcome(StrEnum):
    """What one case came to, from what says nothing to the worst."""

    NOT_OFFERED = "not_offered"
    """The implementation leaves the function out, or raises NotImplementedError."""
    NOT_HERE = "not_here"
    """This machine cannot tell: no GPU, too few devices; the message says what is missing."""
    SKIPPED = "skipped"
    """Left out by choice; the message says why."""
    PASSED = "passed"
    EXPECTED_FAILURE = "expected_failure"
    """Failed as the implementation's own expectations file declares."""
    UNEXPECTED_PASS = "unexpected_pass"
    """Passed although declared to fail: the declaration is stale."""
    FAILED = "failed"
    """Observed something that the norm forbids, or raised."""
    DIED = "died"
    """A rank's process ended during the call."""
    HANG = "hang"
    """Ranks were blocked without progress."""
    BLOCKED = "blocked"
    """Not tried: a function does not fit the contract, so no call of it would tell anything."""
    ERROR = "error"
    """The rig or the adapter is at fault: nothing is known about the implementation."""


SILENT = frozenset({Outcome.NOT_OFFERED, Outcome.NOT_HERE, Outcome.SKIPPED})
"""They say nothing about the norm: neither in a numerator nor in a denominator."""

REFUTED = frozenset({Outcome.FAILED, Outcome.HANG, Outcome.DIED, Outcome.UNEXPECTED_PASS})
"""The clause does not hold as declared: status 1 for a MUST at or below the level."""

BROKEN = frozenset({Outcome.ERROR, Outcome.BLOCKED})
"""The run could not find out: status 2."""


def compose(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of a cell: the worst of its cases, one or more."""
    return max(outcomes, key=[*Outcome].index)


def results(events: Iterable[Event], implementation: str | None = None) -> list[Event]:
    """The result events, of one implementation if it is named."""
    return [
        event
        for event in events
        if event.get("event") == "result"
        and (implementation is None or event["implementation"] == implementation)
    ]


def header(events: Sequence[Event]) -> Event:
    """The header of a log, or an empty one if it was lost."""
    return events[0] if events and events[0].get("event") == "header" else {}


def level_of(events: Sequence[Event], implementation: str) -> str:
    """The level that an implementation is held to: its own in `levels`, else the run's."""
    first = header(events)
    level: str = first.get("levels", {}).get(implementation, first.get("level", "correct"))
    return level


def is_complete(events: Sequence[Event]) -> bool:
    """Whether the run reached its end: the last event is a footer that says so."""
    return bool(events) and events[-1].get("event") == "footer" and bool(events[-1]["complete"])


@dataclass(frozen=True)
class Cell:
    """One clause on one implementation, over all cases that ran."""

    clause: str
    implementation: str
    strength: str
    level: str
    cases: tuple[Event, ...]
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        """Compose the outcome once; the cell is frozen."""
        outcome = compose(Outcome(case["outcome"]) for case in self.cases)
        object.__setattr__(self, "outcome", outcome)

    @property
    def decisive_cases(self) -> list[Event]:
        """The cases that bear the cell's own outcome: the ones to look at."""
        return [case for case in self.cases if case["outcome"] == self.outcome]

    def is_within(self, level: str) -> bool:
        """Whether the clause stands at or below the level."""
        return is_within(self.level, level)

    def decides(self, level: str) -> bool:
        """Whether the exit status counts this cell."""
        return self.strength == "MUST" and self.is_within(level)


def cells(events: Iterable[Event], implementation: str | None = None) -> list[Cell]:
    """The cells, of one implementation if it is named, in the order of their first cases."""
    grouped: dict[tuple[str, str], list[Event]] = {}
    for event in results(events, implementation):
        grouped.setdefault((event["clause"], event["implementation"]), []).append(event)
    return [
        Cell(clause, name, found[0]["strength"], found[0]["level"], tuple(found))
        for (clause, name), found in grouped.items()
    ]


@dataclass(frozen=True)
class Verdict:
    """The exit status and the reasons for it, one line each."""

    status: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """One line: what the status means."""
        return {
            0: "conforms: every MUST clause at or below the level holds for what is offered",
            1: "does not conform: a MUST clause at or below the level does not hold",
            2: "no verdict: the run is broken",
        }[self.status]


def judge_run(events: Sequence[Event]) -> Verdict:
    """The verdict on what the events say, whether or not the footer is written yet.

    The writer asks this to fill the footer; a reader asks `verdict`, which wants the footer too.
    """
    broken = [f"problem: {event['message']}" for event in events if event.get("event") == "problem"]
    refuted = []
    found = cells(events)
    for cell in found:
        if any(Outcome(case["outcome"]) in BROKEN for case in cell.cases):
            broken.append(f"{cell.outcome}: {cell.clause} on {cell.implementation}")
        elif cell.outcome in REFUTED and cell.decides(level_of(events, cell.implementation)):
            refuted.append(f"{cell.outcome}: {cell.clause} on {cell.implementation}")
    if all(cell.outcome in SILENT for cell in found):
        asked = {level_of(events, cell.implementation) for cell in found}
        above = [level for level in LEVELS if all(not is_within(level, each) for each in asked)]
        is_absent = any(cell.outcome is Outcome.NOT_OFFERED for cell in found)
        hint = f"; a higher level may judge more: --level {above[0]}" if is_absent and above else ""
        broken.append(f"nothing ran: no clause that was selected is offered and can run here{hint}")
    if broken:
        return Verdict(2, tuple(broken + refuted))
    absent = sum(cell.outcome is Outcome.NOT_HERE for cell in found)
    judged = sum(cell.outcome not in SILENT for cell in found)
    notes = (
        [f"only {judged} of {judged + absent} clauses could run here"] if absent > judged else []
    )
    return Verdict(1 if refuted else 0, tuple(refuted + notes))


def verdict(events: Sequence[Event]) -> Verdict:
    """The verdict of a finished log; a log without footer gives none (status 2)."""
    if not is_complete(events):
        return Verdict(2, ("INCOMPLETE: the log has no footer, the run did not reach its end",))
    return judge_run(events)


def count_outcomes(events: Iterable[Event]) -> dict[str, int]:
    """How many cases came to what; every outcome is listed, so that none is overlooked."""
    counted = Counter(event["outcome"] for event in results(events))
    return {str(outcome): counted[outcome] for outcome in Outcome}
