"""Outcomes, cells, exit status, and the renderings of a log; what a log keeps when a run is killed.

Whole renderings are kept in `goldens/report`; see `golden` for how to write them anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from spec_tests.rig.outcomes import Event, Outcome, compose, judge_run, verdict
from spec_tests.rig.report import write_report
from spec_tests.rig.report.data import render_json
from spec_tests.rig.report.ending import render_ending
from spec_tests.rig.report.eventlog import EventLog, read_log
from spec_tests.rig.report.page import render_page
from spec_tests.rig.report.points import render_gradescope, render_points
from spec_tests.rig.report.text import INCOMPLETE, WORDS, render_summary
from spec_tests.tests.rig import golden
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


def test_every_outcome_has_its_own_word():
    assert set(WORDS) == set(Outcome)
    assert len(set(WORDS.values())) == len(Outcome)


# ------------------------------------------------------------------------------------ exit status

BROKEN = [result("error", case="w1"), result("hang", case="w2")]
STATUS: dict[str, tuple[list[Event], int]] = {
    **{
        f"{outcome} beside a pass": ([result(clause="a.b"), result(outcome)], status)
        for status, outcomes in (
            (0, "passed not_offered not_here skipped expected_failure"),
            (1, "failed hang died unexpected_pass"),
            (2, "error blocked"),
        )
        for outcome in outcomes.split()
    },
    **{f"{each} alone": ([result(each)], 2) for each in ("not_offered", "not_here", "skipped")},
    "nothing": ([], 2),
    "a SHOULD fails": ([result("failed", strength="SHOULD")], 0),
    "above the level": ([result("failed", level="production")], 0),
    "an error beside cases that look worse": (BROKEN, 2),
}


@pytest.mark.parametrize(("results", "status"), STATUS.values(), ids=STATUS)
def test_the_exit_status_of_a_run(results: list[Event], status: int):
    assert judge_run(log(*results)).status == status
    assert verdict(log(*results)).status == status


def test_an_implementation_may_be_held_to_a_level_of_its_own():
    failed = [
        result("failed", implementation=name, level="production") for name in ("solution", "mine")
    ]
    found = judge_run(log(*failed, levels={"solution": "production"}))
    assert (found.status, found.reasons) == (1, ("failed: ddp.gradients.mean on solution",))


# -------------------------------------------------------------------------------------- renderings


ONE, HAND = "ddp.traffic.first", "a script's own run"
PROFILE = profile(
    {"name": "all", "points": 6, "clauses": [ONE, "zero1.step.closure"]},
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


def test_a_run_that_did_not_end_passes_nothing_on_gradescope():
    events = log(result(), is_finished=False)
    (test,) = json.loads(render_gradescope(events))["tests"]
    assert (test["status"], test["score"], test["output"]) == ("failed", 0, INCOMPLETE)


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
    with closing(EventLog(tmp_path / "events.jsonl", **START)) as writer:
        add(writer)
        writer.finish()
    names = ["events.jsonl", "summary.md", "report.json", "index.html", "results.json"]
    for folder in (tmp_path, tmp_path / "deep" / "report"):
        assert [path.name for path in write_report(folder, writer.path)] == names
        assert (folder / "events.jsonl").read_bytes() == writer.path.read_bytes()
        assert "conforms" in (folder / "summary.md").read_text()


# ------------------------------------------------------------------------------------------ the log


def test_a_finished_log_reads_back_and_replaces_an_older_one(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["spec_tests", "--impl", "a b"])
    path = tmp_path / "new" / "events.jsonl"
    for _ in range(2):
        with closing(EventLog(path, **START)) as log:
            add(log, margins=[{"tolerance": 0.0, "error": float("nan"), "ratio": float("inf")}])
            add(log, Outcome.FAILED, clause="ddp.gradients.other", message="\udcff \x1b[31mred")
            assert log.finish() == 1
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    events = read_log(path)
    assert [event["event"] for event in events] == ["header", "result", "result", "footer"]
    assert events[0]["command"] == "spec_tests --impl 'a b'"
    machine = events[0]
    assert (machine["suite"][0].isdigit(), machine["cores"] >= 1) == (True, True)
    assert machine["torch"] != "not installed"
    assert events[1]["margins"] == [{"tolerance": 0.0, "error": "nan", "ratio": "inf"}]
    assert events[2]["message"] == "? \x1b[31mred", "what UTF-8 lacks does not stop the run"
    counts = dict.fromkeys(map(str, Outcome), 0) | {"passed": 1, "failed": 1}
    assert (events[-1]["counts"], events[-1]["exit_status"]) == (counts, 1)


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_refused(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "header"}\n{"event": "resu', encoding="utf-8")
    assert read_log(path) == [{"event": "header"}]
    path.write_text('{"event": "resu\n{"event": "header"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: expected one JSON object per line"):
        read_log(path)


def test_where_nothing_was_judged_a_higher_level_is_named(tmp_path: Path):
    for level, hint in (("course", "--level correct"), ("correct", "--level production")):
        with closing(EventLog(tmp_path / level, **{**START, "level": level})) as log:
            add(log, Outcome.NOT_OFFERED)
        (reason,) = judge_run(log.events).reasons
        assert reason.startswith("nothing ran: ")
        assert reason.endswith(hint)


def test_a_run_that_is_mostly_not_here_says_so():
    absent = [result("not_here", clause=f"ddp.absent.{n}") for n in range(2)]
    found = judge_run([result(), *absent])
    assert found.status == 0
    assert found.reasons == ("only 1 of 3 clauses could run here",)
    assert not judge_run([result(), *absent[:1]]).reasons


def test_a_problem_of_the_run_breaks_it(tmp_path: Path):
    with closing(EventLog(tmp_path / "events.jsonl", **START)) as log:
        add(log)
        log.problem("mine.toml, entry 1: matched nothing")
        assert log.finish() == 2
    assert judge_run(log.events).reasons == ("problem: mine.toml, entry 1: matched nothing",)
