"""Outcomes, cells, exit status, and the renderings of a log."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from spec_tests import clause
from spec_tests.rig import outcomes
from spec_tests.rig.eventlog import EventLog
from spec_tests.rig.junit import render_junit
from spec_tests.rig.outcomes import Outcome, cells, compose, judge_run, verdict
from spec_tests.rig.report import (
    INCOMPLETE,
    WORDS,
    render_counts,
    render_summary,
    render_table,
    render_terminal,
    write_report,
)
from spec_tests.rig_tests.logs import log, result

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


def test_cells_are_grouped_by_clause_and_implementation():
    events = log(result(case="w1"), result("failed", case="w2"), result(implementation="torch"))
    found = {(cell.clause, cell.implementation): str(cell.outcome) for cell in cells(events)}
    assert found == {
        ("ddp.gradients.mean", "solution"): "failed",
        ("ddp.gradients.mean", "torch"): "passed",
    }


def test_the_log_and_the_clauses_use_the_same_words():
    # The log does without the clause module, which imports torch: a log is read in a moment.
    assert clause.LEVELS == outcomes.LEVELS
    assert tuple(clause.Strength) == outcomes.STRENGTHS


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


def test_a_log_without_footer_has_no_verdict():
    events = log(result(), is_finished=False)
    assert verdict(events).status == 2
    assert INCOMPLETE in render_terminal(events)
    assert INCOMPLETE in render_summary(events)
    assert "INCOMPLETE" in render_junit(events)
    assert "conforms" not in render_summary(events)


# -------------------------------------------------------------------------------------- renderings


def test_the_table_groups_by_level_then_chapter_and_counts_cases():
    events = log(
        result(case="w1"),
        result("failed", case="w2"),
        result("not_offered", case="w4"),
        result(clause="data.order.no-token-twice"),
        result(clause="ddp.traffic.once", implementation="torch", strength="SHOULD"),
        result(clause="ddp.traffic.once", implementation="torch", case="w4"),
        result(clause="ddp.traffic.last", level="production"),
        result(clause="ddp.traffic.first", level="course"),
        implementations=["solution", "torch"],
    )
    lines = render_table(events).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["**course: ddp**", "", "", ""],
        ["ddp.traffic.first", "MUST", "pass", ""],
        ["**correct: ddp**", "", "", ""],
        ["ddp.gradients.mean", "MUST", "FAIL 1/2", ""],
        ["ddp.traffic.once", "SHOULD", "", "pass 2"],
        ["**correct: data**", "", "", ""],
        ["data.order.no-token-twice", "MUST", "pass", ""],
        ["**production: ddp**", "", "", ""],
        ["ddp.traffic.last", "MUST", "pass", ""],
    ]
    assert "course 1/1 · correct 1/2 · production 1/1" in render_terminal(events)


def test_the_counts_line_keeps_every_kind_apart():
    events = log(
        result(clause="a.one"),
        result("expected_failure", clause="a.two"),
        result("failed", clause="a.three", strength="SHOULD"),
        result("not_offered", clause="a.four"),
        result("not_here", clause="a.five"),
        result(clause="a.six", level="production"),
    )
    assert render_counts(events, "solution") == (
        "MUST 1/2 · SHOULD 0/1 · above level correct 1/1"
        " · not offered 1 · not here 1 · expected failure 1 · failed 1"
    )
    assert render_counts(events, "torch") == "nothing ran"


def test_the_summary_shows_failures_reasons_and_margins():
    margin = {"tolerance": 1e-9, "error": 9e-10, "ratio": 0.9}
    events = log(
        result("failed", message="got 2.000 × the mean\n```\nmore", rerun="pytest -k w2"),
        result("failed", case="w4"),
        result(clause="a.close", case="w3", margins=[margin]),
        result(clause="a.nan", margins=[{**margin, "ratio": "nan"}]),
        result("not_here", clause="a.gpu", message="no GPU\ndetails"),
        seed=7,
    )
    page = render_summary(events)
    assert "does not conform" in page
    assert "### FAIL: ddp.gradients.mean on solution" in page
    assert "````text\ngot 2.000 × the mean\n```\nmore\n````" in page  # the fence holds
    assert "failed as well: `w4`" in page
    assert "again: `pytest -k w2`" in page
    assert "- no GPU: a.gpu\n" in page
    assert page.index("inf of the tolerance: a.nan") < page.index("0.9 of the tolerance: a.close")
    assert "- seed: `7`" in page


def test_the_line_to_run_it_again_stands_there_once():
    page = render_summary(
        log(result("failed", message="2\nagain: pytest -k w2", rerun="pytest -k w2"))
    )
    assert page.count("pytest -k w2") == 1
    cut = "\n".join([*map(str, range(100)), "again: pytest -k w2"])
    page = render_summary(log(result("failed", message=cut, rerun="pytest -k w2")))
    assert page.count("again: `pytest -k w2`") == 1


def test_a_long_message_is_cut_with_a_word():
    page = render_summary(log(result("failed", message="\n".join(map(str, range(100))))))
    assert "... 60 more lines in events.jsonl" in page


def test_junit_maps_outcomes_and_keeps_our_own():
    events = log(*(result(str(outcome), case=str(outcome)) for outcome in Outcome))
    root = ET.fromstring(render_junit(events))
    suite = root[0]
    kinds = {
        case.get("name"): [child.tag for child in case if child.tag != "properties"]
        for case in suite
    }
    assert kinds["mean[passed]"] == []
    for name in ("failed", "hang", "died", "unexpected_pass"):
        assert kinds[f"mean[{name}]"] == ["failure"]
    for name in ("error", "blocked"):
        assert kinds[f"mean[{name}]"] == ["error"]
    for name in ("expected_failure", "not_offered", "not_here", "skipped"):
        assert kinds[f"mean[{name}]"] == ["skipped"]
    counted = [suite.get(key) for key in ("tests", "failures", "errors", "skipped")]
    assert counted == ["11", "4", "2", "4"]
    properties = {p.get("name"): p.get("value") for p in suite[0][0]}
    assert properties["outcome"] == "not_offered"
    assert properties["world_size"] == "2"


def test_junit_survives_what_xml_forbids():
    message = "\x1b[31mred\x1b[0m \x00 \ufffe <tag> & 'quotes'\nsecond"
    root = ET.fromstring(render_junit(log(result("died", message=message))))
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.text == "?[31mred?[0m ? ? <tag> & 'quotes'\nsecond"
    assert failure.get("type") == "died"


def test_a_report_is_written_whole_beside_its_log(tmp_path: Path):
    with EventLog.start(
        tmp_path / "events.jsonl",
        level="correct",
        implementations=["solution"],
        transport="gloo",
        profile="quick",
        seed=0,
        ledger="abc",
    ) as writer:
        writer.result(
            clause="a.b",
            implementation="solution",
            outcome=Outcome.PASSED,
            strength="MUST",
            level="course",
        )
        writer.finish()
    names = ["events.jsonl", "summary.md", "report.json", "index.html", "junit.xml", "results.json"]
    assert [path.name for path in write_report(tmp_path, writer.path)] == names
    elsewhere = tmp_path / "deep" / "report"
    write_report(elsewhere, writer.path)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(names)
    assert (elsewhere / "events.jsonl").read_bytes() == writer.path.read_bytes()
    assert "conforms" in (elsewhere / "summary.md").read_text()
