"""The event log: what is written, what survives a kill, what the schema check sees."""

import json
import signal
from pathlib import Path

import pytest

from spec_tests.rig.outcomes import Outcome, is_complete, judge_run, verdict
from spec_tests.rig.report.eventlog import EventLog, environment, read_log
from spec_tests.tests.rig.helpers import python
from spec_tests.tests.rig.logs import START, add


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
        ({"clause": 3}, "'clause' has type int"),
        ({"rerun": None}, "'rerun' has type NoneType"),
        ({"margins": [{"error": 1.0}]}, "expected a margin with tolerance, error, ratio"),
    ],
    ids=["outcome", "strength", "level", "type", "nothing", "margin"],
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
