"""Logs made by hand, for tests of what is made of a log."""

from __future__ import annotations

from spec_tests.rig.outcomes import Event, count_outcomes, judge_run


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
