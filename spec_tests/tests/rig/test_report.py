"""Outcomes, cells, exit status, and the renderings of a log; what a log keeps when a run is killed.

Whole renderings are kept in `goldens/report`; see `golden` for how to write them anew.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spec_tests.rig.outcomes import Event, Outcome, compose, is_complete, judge_run, verdict
from spec_tests.rig.report import (
    INCOMPLETE,
    WORDS,
    render_ending,
    render_gradescope,
    render_json,
    render_page,
    render_points,
    render_summary,
    write_report,
)
from spec_tests.rig.report.eventlog import EventLog, environment, read_log
from spec_tests.tests.rig import golden
from spec_tests.tests.rig.helpers import python
from spec_tests.tests.rig.logs import MESSAGE, START, TOLD, add, log, profile, result

# ------------------------------------------------------------------------------------ composition


@pytest.mark.parametrize(
    ("cases", "cell"),
    [
        (["passed", "not_offered", "not_here", "skipped"], "passed"),
        (["failed", "not_offered", "passed"], "failed"),
        (["not_offered", "not_offered"], "not_offered"),
        (["not_offered", "not_here"], "not_here"),
        (["expected_failure", "passed"], "expected_failure"),
        (["expected_failure", "unexpected_pass"], "unexpected_pass"),
        (["hang", "failed", "died"], "hang"),
        (["error", "failed"], "error"),
        (["passed", "blocked"], "blocked"),
    ],
    ids=" ".join,
)
def test_a_cell_is_the_worst_of_its_cases(cases, cell):
    assert compose(map(Outcome, cases)) == cell
    assert compose(map(Outcome, reversed(cases))) == cell


def test_a_cell_without_cases_does_not_exist():
    with pytest.raises(ValueError, match="at least one case"):
        compose([])


def test_every_outcome_has_its_own_word():
    assert set(WORDS) == set(Outcome)
    assert len(set(WORDS.values())) == len(Outcome)


# ------------------------------------------------------------------------------------ exit status


@pytest.mark.parametrize("outcome", list(Outcome), ids=str)
def test_the_exit_status_of_each_outcome_beside_a_pass(outcome):
    status = {
        Outcome.FAILED: 1,
        Outcome.HANG: 1,
        Outcome.DIED: 1,
        Outcome.UNEXPECTED_PASS: 1,
        Outcome.ERROR: 2,
        Outcome.BLOCKED: 2,
    }.get(outcome, 0)
    events = log(result(clause="a.b"), result(str(outcome)))
    assert judge_run(events).status == status
    assert verdict(events).status == status


@pytest.mark.parametrize("outcome", ["not_offered", "not_here", "skipped"])
def test_a_run_in_which_nothing_ran_is_broken(outcome):
    assert judge_run(log(result(outcome))).status == 2
    assert judge_run(log()).status == 2


@pytest.mark.parametrize(
    "fields",
    [{"strength": "SHOULD"}, {"strength": "MAY"}, {"level": "production"}],
    ids=["should", "may", "above the level"],
)
def test_what_does_not_decide_does_not_decide(fields):
    assert judge_run(log(result("failed", **fields))).status == 0


def test_an_implementation_may_be_held_to_a_level_of_its_own():
    failed = [
        result("failed", implementation=name, level="production") for name in ("solution", "mine")
    ]
    levels = {"solution": "production"}
    found = judge_run(log(*failed, levels=levels))
    assert found.status == 1
    assert found.reasons == ("failed: ddp.gradients.mean on solution",)


def test_a_broken_run_is_broken_whatever_else_it_found():
    found = judge_run(log(result("failed"), result("error", clause="a.b")))
    assert found.status == 2
    assert found.reasons == ("error: a.b on solution", "failed: ddp.gradients.mean on solution")


def test_an_error_beside_worse_looking_cases_is_not_hidden():
    assert judge_run(log(result("error", case="w1"), result("hang", case="w2"))).status == 2


# -------------------------------------------------------------------------------------- renderings


ONE, HAND = "ddp.traffic.first", "a script's own run"
PROFILE = profile(
    {"name": "all", "points": 6, "clauses": [ONE, "zero1.step.closure"]},
    {"name": "a share", "points": 3, "clauses": [ONE, "zero1.step.closure"], "share": True},
    {"name": "one", "points": 2, "clauses": [ONE]},
    {"name": "failed", "points": 6, "clauses": ["ddp.gradients.mean"]},
    {"name": "essay", "points": 4, "by_hand": "a person reads it"},
    {"name": "left out", "points": 1, "clauses": ["clip.never.run"]},
    {"name": "by hand", "points": 1, "clauses": ["zero1.step.closure"], "by_hand": HAND},
    {"name": "in part", "points": 1, "clauses": ["zero1.step.closure", ONE], "by_hand": HAND},
    {"name": "not by hand", "points": 1, "clauses": [ONE], "by_hand": HAND},
    level="production",
)


def everything() -> list[Event]:
    """A log in which every part of every rendering has something to show."""
    again = "pytest -k long"
    long = "\n".join([*map(str, range(100)), f"again: {again}"])
    margin = {"tolerance": 1e-9, "error": 9e-10, "ratio": 0.9}
    torch = {"implementation": "torch"}
    return log(
        TOLD,
        result("failed", message=MESSAGE, rerun="python -m x"),
        *(result("failed", case="w3"), result(case="w4"), result("not_offered", case="w5")),
        result("failed", clause="ddp.traffic.long", message=long, rerun=again),
        result("failed", clause="ddp.traffic.fence", message="2\n```\nmore", rerun="pytest -k w2"),
        result(clause="data.order.no-token-twice", margins=[margin]),
        result(clause="data.order.nan", margins=[{**margin, "ratio": "nan"}]),
        result("expected_failure", clause="data.order.declared", message="expected: known"),
        result("not_here", clause="data.order.gpu", message="no GPU\ndetails"),
        result("not_offered", clause="zero1.step.closure"),
        result("skipped", clause="zero1.step.skipped"),
        result("failed", clause="ddp.traffic.once", strength="SHOULD"),
        result(clause="ddp.traffic.last", level="production"),
        result("unexpected_pass", clause="ddp.traffic.first", level="course", **torch),
        result(clause="ddp.traffic.first", level="course"),
        result("hang", **torch),
        *(result(clause="ddp.traffic.once", strength="SHOULD", case=w, **torch) for w in "ab"),
        result("died", clause="ddp.traffic.died", **torch),
        implementations=["solution", "torch", "idle"],
        points=PROFILE,
        seed=7,
        suite="2026.1",
    )


RENDERINGS: dict[str, Callable[[list[Event]], str]] = {
    "terminal.txt": partial(render_ending, everything=True),
    "ending.txt": render_ending,
    "summary.md": render_summary,
    "report.json": render_json,
    "results.json": render_gradescope,
    "points.txt": render_points,
}


@pytest.mark.parametrize("name", RENDERINGS)
def test_a_rendering_of_everything_is_as_it_was_kept(name: str):
    golden.check(f"report/{name}", RENDERINGS[name](everything()))


@pytest.mark.parametrize("name", ["index.html", *sorted(RENDERINGS.keys() - {"points.txt"})])
def test_a_log_without_footer_has_no_verdict_and_is_worth_no_point(name: str):
    item = {"name": "one", "points": 2, "clauses": ["ddp.gradients.mean"]}
    events = log(result(), points=profile(item), is_finished=False)
    assert verdict(events).status == 2
    said = {**RENDERINGS, "index.html": render_page}[name](events)
    assert INCOMPLETE in said
    assert "conforms" not in said
    assert '"status": 0' not in said
    assert name != "results.json" or '"score": 0' in said


def test_a_report_is_written_whole_beside_its_log(tmp_path: Path):
    with EventLog.start(tmp_path / "events.jsonl", **START) as writer:
        add(writer)
        writer.finish()
    names = ["events.jsonl", "summary.md", "report.json", "index.html", "results.json"]
    assert [path.name for path in write_report(tmp_path, writer.path)] == names
    elsewhere = tmp_path / "deep" / "report"
    write_report(elsewhere, writer.path)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(names)
    assert (elsewhere / "events.jsonl").read_bytes() == writer.path.read_bytes()
    assert "conforms" in (elsewhere / "summary.md").read_text()


# ------------------------------------------------------------------------------------------ the log


def test_a_finished_log_reads_back_and_replaces_an_older_one(tmp_path: Path):
    path = tmp_path / "new" / "events.jsonl"
    for _ in range(2):
        with EventLog.start(path, command=["spec_tests", "--impl", "a b"], **START) as log:
            add(log, margins=[{"tolerance": 1e-9, "error": 1e-12, "ratio": 1e-3}])
            add(log, Outcome.FAILED, clause="ddp.gradients.other")
            assert log.finish() == 1

    events = read_log(path)
    assert [event["event"] for event in events] == ["header", "result", "result", "footer"]
    assert events == log.events
    assert events[0]["command"] == "spec_tests --impl 'a b'"
    counts = dict.fromkeys(map(str, Outcome), 0) | {"passed": 1, "failed": 1}
    assert (events[-1]["counts"], events[-1]["exit_status"]) == (counts, 1)


def test_a_killed_run_leaves_its_results_and_no_verdict(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    program = (
        "import os, signal, sys\n"
        "from spec_tests.rig.report.eventlog import EventLog\n"
        f"log = EventLog.start(sys.argv[1], **{START!r})\n"
        "log.result(clause='a.b', implementation='solution', outcome='passed',"
        " strength='MUST', level='correct')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = python("-c", program, str(path))
    assert done.returncode == -signal.SIGKILL

    events = read_log(path)
    assert [event["event"] for event in events] == ["header", "result"]
    assert not is_complete(events)
    assert verdict(events).status == 2


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_refused(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "header"}\n{"event": "resu', encoding="utf-8")
    assert read_log(path) == [{"event": "header"}]
    path.write_text('{"event": "resu\n{"event": "header"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: expected one JSON object per line"):
        read_log(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_numbers_that_json_lacks_are_written_by_name(tmp_path: Path, value: float):
    with EventLog.start(tmp_path / "events.jsonl", **START) as log:
        add(log, margins=[{"tolerance": 0.0, "error": value, "ratio": value}])
        log.finish()
    line = (tmp_path / "events.jsonl").read_text().splitlines()[1]
    margin = json.loads(line, parse_constant=pytest.fail)["margins"][0]
    assert str(float(margin["ratio"])) == str(value)


def test_where_nothing_was_judged_a_higher_level_is_named(tmp_path: Path):
    for level, hint in (("course", "--level correct"), ("correct", "--level production")):
        start = {**START, "level": level}
        with EventLog.start(tmp_path / level, **start) as log:
            add(log, Outcome.NOT_OFFERED)
        (reason,) = judge_run(log.events).reasons
        assert reason.startswith("nothing ran: ")
        assert reason.endswith(hint)


def test_text_that_utf8_lacks_does_not_stop_the_run(tmp_path: Path):
    with EventLog.start(tmp_path / "events.jsonl", **START) as log:
        add(log, Outcome.FAILED, message="output \udcff and \x1b[31mred\x1b[0m\nnext")
        log.problem("mine.toml, entry 1: matched nothing")
        assert log.finish() == 2, "a problem of the run breaks it"
    assert read_log(log.path)[1]["message"] == "output ? and \x1b[31mred\x1b[0m\nnext"
    reasons = judge_run(log.events).reasons
    assert reasons[0] == "problem: mine.toml, entry 1: matched nothing"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"outcome": "pass"}, "expected outcome in not_offered, .*; got 'pass'"),
        ({"strength": "must"}, "expected strength in MUST, SHOULD, MAY; got 'must'"),
        ({"level": "perfect"}, "expected level in course, correct, production; got 'perfect'"),
    ],
    ids=["outcome", "strength", "level"],
)
def test_an_unknown_word_is_refused_when_it_is_written(tmp_path: Path, fields, said):
    with (
        EventLog.start(tmp_path / "events.jsonl", **START) as log,
        pytest.raises(ValueError, match=said),
    ):
        add(log, **fields)


def test_the_header_names_the_machine():
    found = environment()
    assert found["suite"][0].isdigit()
    assert found["cores"] >= 1
    assert found["torch"] != "not installed"
