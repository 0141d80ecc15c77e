"""report.json: what a run found, as one JSON object for programs.

The schema is stable: keys may be added, and none is removed, renamed or given another meaning
without a new number after the slash in `schema`.

    {
      "schema": "trainspec-report/1",
      "complete": true,                   false: the run did not reach its end, there is no verdict
      "verdict": {"status": 1, "text": "does not conform: ...", "reasons": ["failed: ..."]},
      "run": {"suite": "2026.1", "ledger": "957c44c886b3", "torch": "2.13.0", "command": ..., ...},
      "problems": ["..."],                what was wrong with the run itself
      "implementations": [{
        "name": "mine.py",
        "level": "correct",               what it is held to
        "levels": {"course": {"passed": 38, "judged": 40}, ...},   MUST clauses, see `outcomes`
        "outcomes": {"passed": 120, "failed": 2, ...},             clauses, of every strength
        "causes": [{"text": "ddp: summed and ...", "level": "course", "clauses": ["ddp...", ...],
                    "function": "ddp", "case": "ddp-w3-mlp",   a case of the first clause
                    "like": "ddp.sum-for-mean",           the near-miss that it is like, or ""
                    "family": "wrong-divisor or stale"}],    the kind of fault; "" if not certain
        "points": null                    or {"title", "note", "points", "of", "items": [{"name",
      }],                  "points", "of", "by_hand", "not_judged", "missing": {clause: outcome}}]}
      "clauses": [{                       in the order of the run; all implementations' together
        "id": "ddp.gradients.mean", "chapter": "ddp", "strength": "MUST", "level": "course",
        "sentence": "Every rank MUST ...", "source": "Li et al. 2020, ...",
        "where": "spec_tests/chapters/ddp/test_gradients.py:41",
        "stories": [{"impostor": "ddp.sum-for-mean", "does": ..., "seen": ..., "unseen": ...}],
        "cells": {                        implementation to what it came to; absent: not selected
          "mine.py": {
            "outcome": "failed",          the worst of its cases; words of `outcomes.Outcome`
            "text": "FAIL (2 of 12 cases)",   the same for people
            "cases": [{
              "case": "ddp-w2-mlp", "outcome": "failed", "world_size": 2, "duration_s": 0.03,
              "message": "...",           "" where it passed
              "likely": "summed and ...", the diagnosis out of the message, "" without one
              "symptom": "likely: ...",  what the message shows, as programs compare it
              "rerun": "python -m ...",   "" where it passed
              "margins": [{"tolerance": ..., "error": ..., "ratio": ...}]   numbers, or "nan", "inf"
              "evidence": {           what can be shown of it: none of these, or some
                "wrong": {"name": "fc.weight", "shape": [5, 6],      elements of the first wrong
                          "ranks": {"0": ["0110...", rows, columns]}},   tensor, as below
                "lanes": [{"rank": 0, "state": "in the body", "waits": true,    collectives:
                           "calls": [["all_reduce [[3]]", 8, "0"], ...]}, ...],   number, group
                "memory": {"rank": 0, "points": [["after forward", 318584], ...],   bytes
                           "judged": 5, "allowed": 235008},   index of a point, and its limit
                "source": {"file": "mine.py", "line": 12, "first": 10, "lines": [...]}
              }}]}}}]
    }

Cells of a wrong tensor, row by row, at most 16 by 16 for a rank: "0" right, "1" wrong, "x" wrong
and not finite, "-" nothing to compare. A cell of a larger tensor shows the worst of its elements.
"source" is the innermost line of the judged code in the message, with those around it, as it was
when the log was written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spec_tests.rig.outcomes import (
    REFUTED,
    Event,
    Outcome,
    cells,
    header,
    is_complete,
    level_of,
    verdict,
)
from spec_tests.rig.report.causes import causes
from spec_tests.rig.report.points import score
from spec_tests.rig.report.symptom import likely, symptom
from spec_tests.rig.report.text import (
    INCOMPLETE,
    RUN_KEYS,
    chapter,
    count_levels,
    implementations,
    render_cell,
)

SCHEMA = "trainspec-report/1"

Report = dict[str, Any]
"""The object above."""


def render_json(events: Sequence[Event]) -> str:
    """The whole file as text."""
    return json.dumps(as_report(events), indent=1, ensure_ascii=False) + "\n"


def as_report(events: Sequence[Event]) -> Report:
    """The events of a log as the object that the module describes."""
    first, judged = header(events), verdict(events)
    return {
        "schema": SCHEMA,
        "complete": is_complete(events),
        "verdict": {
            "status": judged.status,
            "text": str(judged) if is_complete(events) else INCOMPLETE,
            "reasons": list(judged.reasons),
        },
        "run": {key: first[key] for key in RUN_KEYS if key in first},
        "problems": [event["message"] for event in events if event.get("event") == "problem"],
        "implementations": [_column(events, name) for name in implementations(events)],
        "clauses": _rows(events),
    }


def _column(events: Sequence[Event], name: str) -> dict[str, Any]:
    own = cells(events, name)
    counted = Counter(str(cell.outcome) for cell in own)
    return {
        "name": name,
        "level": level_of(events, name),
        "levels": {
            level: {"passed": passed, "judged": of}
            for level, (passed, of) in count_levels(own).items()
        },
        "outcomes": {str(outcome): counted[outcome] for outcome in Outcome if counted[outcome]},
        "causes": [
            {
                "text": cause.title,
                "like": cause.like,
                "family": " or ".join(cause.families),
                "function": cause.function,
                "case": cause.first.decisive_cases[0]["case"],
                "level": cause.first.level,
                "clauses": cause.clauses,
            }
            for cause in causes(events, name)
        ],
        "points": score(events, name),
    }


def _rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    told = {event["clause"]: event for event in events if event.get("event") == "clause"}
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells(events):
        if cell.clause not in rows:
            known: Mapping[str, Any] = told.get(cell.clause, {})
            rows[cell.clause] = {
                "id": cell.clause,
                "chapter": chapter(cell.clause),
                "strength": cell.strength,
                "level": cell.level,
                **{key: known.get(key, "") for key in ("sentence", "source", "where")},
                "stories": known.get("stories", []),
                "cells": {},
            }
        rows[cell.clause]["cells"][cell.implementation] = {
            "outcome": str(cell.outcome),
            "text": render_cell(cell),
            "cases": [_case(case) for case in cell.cases],
        }
    return list(rows.values())


_KEPT = ("case", "outcome", "world_size", "duration_s", "message")


def _case(case: Event) -> dict[str, Any]:
    has_passed = case["outcome"] == Outcome.PASSED
    is_finding = Outcome(case["outcome"]) in REFUTED - {Outcome.UNEXPECTED_PASS}
    return {
        **{key: case[key] for key in _KEPT},
        "likely": likely(case["message"]),
        "symptom": symptom(case["outcome"], case["message"]) if is_finding else "",
        "rerun": "" if has_passed else case["rerun"],
        "margins": case["margins"],
        "evidence": case.get("evidence", {}),
    }
