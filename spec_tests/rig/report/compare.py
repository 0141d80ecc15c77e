"""`python -m spec_tests compare BEFORE AFTER`: what got better, and what broke.

Each is a folder that `--report` wrote, its events.jsonl or its report.json. Compared case by case,
so that a clause which failed in two of twelve cases and now fails in three has broken. Two reports
on one implementation each are compared whatever its names (mine.py against mine_new.py); otherwise
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_tests.rig.outcomes import Outcome, is_within
from spec_tests.rig.report.data import Report, read_report
from spec_tests.rig.report.templates import of_texts

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


def compare(before: Report, after: Report) -> list[Change]:
    """Every clause that changed, what broke first.

    Raises:
        ValueError: One of them is incomplete, or they have no implementation in common.
    """
    for title, report in (("before", before), ("after", after)):
        if not report["complete"]:
            raise ValueError(f"{title}: expected a run that reached its end, got an incomplete log")
    changes = []
    for old, new in _pairs(before, after):
        levels = {found["name"]: found["level"] for found in after["implementations"]}
        earlier = {row["id"]: row for row in before["clauses"] if old in row["cells"]}
        later = {row["id"]: row for row in after["clauses"] if new in row["cells"]}
        for clause, row in (earlier | later).items():
            then = earlier[clause]["cells"][old] if clause in earlier else None
            now = later[clause]["cells"][new] if clause in later else None
            kind, cases = _kind(then, now)
            decides = row["strength"] == "MUST" and is_within(row["level"], levels[new])
            was, is_now = (cell["text"] if cell else _NOT_RUN for cell in (then, now))
            likely = _likely(now, cases)
            if kind:
                changes.append(Change(clause, new, kind, decides, was, is_now, cases, likely))
    return sorted(changes, key=lambda change: list(KINDS).index(change.kind))


def _pairs(before: Report, after: Report) -> list[tuple[str, str]]:
    old = [found["name"] for found in before["implementations"]]
    new = [found["name"] for found in after["implementations"]]
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    common = [(name, name) for name in new if name in old]
    if not common:
        raise ValueError(
            f"expected an implementation that both reports judge, got {', '.join(old) or 'none'} "
            f"before and {', '.join(new) or 'none'} after"
        )
    return common


def _kind(
    then: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> tuple[str, tuple[str, ...]]:
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


def _outcomes(cell: Mapping[str, Any] | None) -> dict[str, Outcome]:
    return {case["case"]: Outcome(case["outcome"]) for case in cell["cases"]} if cell else {}


def _likely(cell: Mapping[str, Any] | None, cases: Sequence[str]) -> str:
    found = [case["likely"] for case in cell["cases"] if case["case"] in cases] if cell else []
    return next(filter(None, found), "")


def render_comparison(before: Report, after: Report, changes: Sequence[Change]) -> str:
    """The comparison as Markdown, for a terminal or a pull request."""
    keys = ("suite", "ledger", "torch", "platform", "transport", "profile")
    runs = [(key, before["run"].get(key), after["run"].get(key)) for key in keys]
    template = of_texts().get_template("comparison.md.jinja")
    return template.render(
        before=_name(before),
        after=_name(after),
        unlike=[(key, old, new) for key, old, new in runs if old != new],
        kinds=KINDS,
        changes=changes,
        left_out=lambda those: Counter(_chapter(c) for c in those if c.after == _NOT_RUN),
        not_run=_NOT_RUN,
    )


def _chapter(change: Change) -> str:
    return f"{change.clause.partition('.')[0]} on {change.implementation}"


def _name(report: Report) -> str:
    names = ", ".join(found["name"] for found in report["implementations"])
    return f"{names} ({report['run'].get('started', 'at an unknown time')})"


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests compare", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("before", help="report folder, events.jsonl or report.json")
    parser.add_argument("after", help="the same of a later run")
    flags = parser.parse_args(arguments)
    try:
        before, after = read_report(flags.before), read_report(flags.after)
        changes = compare(before, after)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's product
        return 2
    print(render_comparison(before, after, changes))  # noqa: T201 - likewise
    return int(any(change.kind == "broke" and change.decides for change in changes))
