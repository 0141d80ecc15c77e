"""`python -m spec_tests compare BEFORE AFTER`: what got better, and what broke.

Each is a folder that `--report` wrote, or its events.jsonl. Compared case by case, so that a clause
which failed in two of twelve cases and now fails in three has broken. Two reports on one
implementation each are compared whatever its names (mine.py against mine_new.py); otherwise
implementations meet by name.

    broke      a case held and does not any more: it fails, hangs, died, is declared as a deviation,
               or is not offered any more
    mended     the reverse
    new        a case that was not judged before, or not offered, does not hold: decides nothing
    unknown    it cannot be told any more: not here, skipped, blocked, error of the rig, left out

Exit status: 0 nothing that decides broke; 1 a MUST clause at or below the level did; 2 nothing can
be compared: a file is missing or incomplete, or no implementation is in both reports.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_tests.rig.outcomes import Cell, Event, Outcome, cells, header, is_complete, level_of
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.report.symptom import likely
from spec_tests.rig.report.templates import of_texts
from spec_tests.rig.report.text import chapter, implementations, render_cell

_HELD = {Outcome.PASSED}
_BAD = {
    Outcome.FAILED,
    Outcome.HANG,
    Outcome.DIED,
    Outcome.UNEXPECTED_PASS,
    Outcome.EXPECTED_FAILURE,
    Outcome.NOT_OFFERED,
}

KINDS = {
    "broke": "What broke",
    "mended": "What got better",
    "new": "New, and does not hold",
    "unknown": "What is not known any more",
}
"""Kind of change to its heading, in the order of importance."""
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Change:
    """What became of one clause on one implementation."""

    clause: str
    implementation: str
    kind: str  # a key of `KINDS`
    decides: bool
    before: str  # cells as people read them
    after: str
    cases: tuple[str, ...]
    likely: str


def compare(before: Sequence[Event], after: Sequence[Event]) -> list[Change]:
    """Every clause that changed, what broke first.

    Raises:
        ValueError: One of them is incomplete, or they have no implementation in common.
    """
    for title, events in (("before", before), ("after", after)):
        if not is_complete(events):
            raise ValueError(f"{title}: expected a run that reached its end, got an incomplete log")
    changes = []
    for old, new in _pairs(before, after):
        level = level_of(after, new)
        earlier = {cell.clause: cell for cell in cells(before, old)}
        later = {cell.clause: cell for cell in cells(after, new)}
        for clause, cell in (earlier | later).items():
            then, now = earlier.get(clause), later.get(clause)
            kind, cases = _kind(then, now)
            said = [case["message"] for case in now.cases if case["case"] in cases] if now else []
            was, is_now = (render_cell(each) or _NOT_RUN for each in (then, now))
            first = next(filter(None, map(likely, said)), "")
            if kind:
                changes.append(
                    Change(clause, new, kind, cell.decides(level), was, is_now, cases, first)
                )
    return sorted(changes, key=lambda change: list(KINDS).index(change.kind))


def _pairs(before: Sequence[Event], after: Sequence[Event]) -> list[tuple[str, str]]:
    old, new = implementations(before), implementations(after)
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    common = [(name, name) for name in new if name in old]
    if not common:
        raise ValueError(
            f"expected an implementation that both reports judge, got {', '.join(old) or 'none'} "
            f"before and {', '.join(new) or 'none'} after"
        )
    return common


def _kind(then: Cell | None, now: Cell | None) -> tuple[str, tuple[str, ...]]:
    """What kind of change two cells make, and the cases that make it."""
    was, is_now = _outcomes(then), _outcomes(now)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for case in was | is_now:
        old, new = was.get(case), is_now.get(case)
        if old in _HELD and new in _BAD:
            found["broke"].append(case)
        elif old in _HELD and new not in _HELD:
            found["unknown"].append(case)
        elif new in _HELD and old in _BAD:
            found["mended"].append(case)
        elif new in _BAD - {Outcome.NOT_OFFERED} and old in (None, Outcome.NOT_OFFERED):
            found["new"].append(case)
    for kind, cases in found.items():
        if cases:
            return kind, tuple(cases)
    return "", ()


def _outcomes(cell: Cell | None) -> dict[str, Outcome]:
    return {case["case"]: Outcome(case["outcome"]) for case in cell.cases} if cell else {}


def render_comparison(
    before: Sequence[Event], after: Sequence[Event], changes: Sequence[Change]
) -> str:
    """The comparison as Markdown, for a terminal or a pull request."""
    keys = ("suite", "ledger", "torch", "platform", "transport", "profile")
    runs = [(key, header(before).get(key), header(after).get(key)) for key in keys]
    template = of_texts().get_template("comparison.md.jinja")
    return template.render(
        before=_name(before),
        after=_name(after),
        unlike=[(key, old, new) for key, old, new in runs if old != new],
        kinds=KINDS,
        changes=changes,
        left_out=lambda those: Counter(
            f"{chapter(c.clause)} on {c.implementation}" for c in those if c.after == _NOT_RUN
        ),
        not_run=_NOT_RUN,
    )


def _name(events: Sequence[Event]) -> str:
    started = header(events).get("started", "at an unknown time")
    return f"{', '.join(implementations(events))} ({started})"


def _log_of(path: str) -> list[Event]:
    if not Path(path).is_dir() and not path.endswith(".jsonl"):
        raise ValueError(f"expected a folder that --report wrote, or its events.jsonl, got {path}")
    return read_log(path)


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests compare", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("before", help="report folder, or its events.jsonl")
    parser.add_argument("after", help="the same of a later run")
    flags = parser.parse_args(arguments)
    try:
        before, after = _log_of(flags.before), _log_of(flags.after)
        changes = compare(before, after)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's product
        return 2
    print(render_comparison(before, after, changes))  # noqa: T201 - likewise
    return int(any(change.kind == "broke" and change.decides for change in changes))
