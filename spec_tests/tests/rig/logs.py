"""Logs made by hand, for tests of what is made of a log."""

from __future__ import annotations

from typing import Any

from spec_tests.rig.outcomes import Event, Outcome, count_outcomes, judge_run
from spec_tests.rig.report.eventlog import EventLog

MESSAGE = (
    "[ddp.gradients.mean]  It MUST.\nrank 0: got 2\nlikely: summed and not divided\n"
    "again: python -m x"
)
STORY = {"impostor": "ddp.sum", "does": "It sums.", "seen": "Here.", "unseen": "Adam."}
TOLD: Event = {
    "event": "clause",
    "clause": "ddp.gradients.mean",
    "sentence": "Every rank MUST hold the mean.",
    "source": "Li et al. 2020",
    "where": "spec_tests/chapters/ddp/test_gradients.py:41",
    "stories": [STORY],
}


def profile(*items: dict[str, object], **more: object) -> dict[str, object]:
    """A profile of points as it is in a header, after `points.resolve`."""
    filled = [{"by_hand": "", "clauses": [], **item} for item in items]
    return {"title": "Week 5", "items": filled, **more}


def result(
    outcome: str = "passed",
    *,
    clause: str = "ddp.gradients.mean",
    implementation: str = "solution",
    case: str = "w2",
    **more: object,
) -> Event:
    """One result, as the plugin would log it."""
    return {
        "event": "result",
        "clause": clause,
        "case": case,
        "node": "",
        "implementation": implementation,
        "world_size": 2,
        "transport": "gloo",
        "strength": "MUST",
        "level": "correct",
        "outcome": outcome,
        "duration_s": 0.5,
        "message": "",
        "margins": [],
        "rerun": "",
        **more,
    }


def log(*found: Event, is_finished: bool = True, **head: object) -> list[Event]:
    """A header, the given events, and the footer that they amount to."""
    first = {"event": "header", "level": "correct", "implementations": ["solution"], **head}
    events = [first, *found]
    if is_finished:
        events.append(
            {
                "event": "footer",
                "counts": count_outcomes(events),
                "complete": True,
                "exit_status": judge_run(events).status,
            }
        )
    return events


START: dict[str, Any] = {
    "level": "correct",
    "implementations": ["solution"],
    "transport": "gloo",
    "profile": "quick",
    "seed": 0,
    "ledger": "abc",
}
"""What a log in a file is started with."""


def add(writer: EventLog, outcome: Outcome = Outcome.PASSED, **more: Any) -> None:
    """Write one result to a log in a file."""
    writer.result(**result(outcome, **more))
