"""What a run shows while it judges, and the ending of a log; no ranks are started."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_tests import __main__ as command
from spec_tests.rig import ledger
from spec_tests.rig.live import Live
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.progress import Progress
from spec_tests.rig.report import INCOMPLETE, render_ending
from spec_tests.rig.report.eventlog import EventLog
from spec_tests.tests.rig.logs import MESSAGE, START, add, log, result


def test_the_first_finding_is_told_at_once_and_chapters_as_they_end():
    told: list[str] = []
    live: Any = Live(told.append, is_mixed=False)
    clauses = [
        SimpleNamespace(function=clause.test, nodeid=clause.id) for clause in ledger.load_all()[:9]
    ]
    live.pytest_collection_finish(SimpleNamespace(items=clauses))
    events = (
        *(result(), result("failed"), result("failed"), result(clause="ddp.a.b")),
        *(result("failed", clause="ddp.a.c", strength="SHOULD"), result(clause="zero1.a.b")),
    )
    for event in events:
        live.pytest_runtest_logreport(SimpleNamespace(trainspec=event, nodeid="f.py::test[w2]"))
    live.pytest_sessionfinish()
    text = "\n".join(told)
    assert text.startswith("first finding, after ")
    assert text.count("first finding") == 1
    assert re.findall(r"(?m)^(ddp|zero1) +(\S.*?)  ", text) == [
        ("ddp", "FAIL 1, pass 1, SHOULD fails 1"),
        ("zero1", "pass 1"),
    ], "in clauses, however many cases they have"


def test_chapters_of_several_implementations_are_told_apart():
    told: list[str] = []
    live: Any = Live(told.append, is_mixed=True)
    for event in (result(), result("failed", implementation="torch")):
        live.pytest_runtest_logreport(SimpleNamespace(trainspec=event, nodeid="f.py::test[w2]"))
    live.pytest_sessionfinish()
    assert told[0].startswith("ddp         solution pass 1; torch FAIL 1 ")


def test_progress_names_the_clause_and_counts_those_that_have_ended():
    shown: Any = SimpleNamespace(say=lambda what: said.append(what), is_to_end=False)
    said: list[str] = []
    live: Any = Live(said.append, is_mixed=False, shown=shown)
    first, second = ledger.load_all()[:2]
    items = [
        SimpleNamespace(function=clause.test, nodeid=f"{clause.id}[{case}]")
        for clause in (first, second)
        for case in ("w2", "w3")
    ]
    live.pytest_collection_finish(SimpleNamespace(items=items))
    for item in items:
        live.pytest_runtest_logstart(item.nodeid)
        live.pytest_runtest_logfinish(item.nodeid)
    assert said == [
        *[f"0 of 2 clauses, now {first.id}"] * 2,
        *[f"1 of 2 clauses, now {second.id}"] * 2,
    ]
    assert live.done == "2 of 2 clauses"
    shown.is_to_end = True
    with pytest.raises(KeyboardInterrupt):  # a signal whose exception somebody has swallowed
        live.pytest_runtest_logstart(items[0].nodeid)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_appended_to_a_file(is_terminal: bool):
    stream = io.StringIO()
    shown = Progress(stream, is_terminal=is_terminal)
    shown.say("1 of 9 clauses, now ddp.gradients.mean")
    shown.draw()
    with shown.hidden():
        stream.write("a finding\n")
    shown.close()
    shown.draw()
    lines = stream.getvalue().split("\n")
    if is_terminal:
        assert lines[0] == (
            "\r\x1b[K   0 s  1 of 9 clauses, now ddp.gradients.mean\r\r\x1b[Ka finding"
        ), "the cursor is back, and the finding replaces it"
        assert lines[1:] == ["\r\x1b[K"]
    else:
        assert lines == ["after 0 min: 1 of 9 clauses, now ddp.gradients.mean", "a finding", ""]


def test_the_ending_of_a_killed_run_is_made_of_its_log(tmp_path: Path, capsys):
    log = EventLog.start(tmp_path / "events.jsonl", **START)
    add(log, Outcome.FAILED, message=MESSAGE)
    log.close()  # as SIGKILL leaves it
    assert command.main(["report", str(tmp_path), "--to", str(tmp_path / "pages")]) == 2
    said = capsys.readouterr().out
    assert INCOMPLETE in said
    assert "summed and not divided" in said
    assert said.endswith(f"report: {tmp_path}/pages/index.html\n")
    assert INCOMPLETE in (tmp_path / "pages" / "index.html").read_text()
    with EventLog.start(tmp_path / "events.jsonl", **START) as log:
        add(log)
        log.finish()
    assert command.main(["report", str(tmp_path / "events.jsonl")]) == 0
    assert command.main(["report", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_with_everything_nothing_is_enumerated_in_part():
    words = {f"ddp.a.n{i}": chr(ord("A") + i % 26) * (1 + i // 26) for i in range(60)}
    messages = {each: f"[{each}]  It MUST.\nrank 0: got {word}" for each, word in words.items()}
    events = log(*(result("failed", clause=each, message=text) for each, text in messages.items()))
    assert " more" in render_ending(events)
    whole = render_ending(events, everything=True)
    assert " more" not in whole
    assert all(f"correct: {each}\n" in whole for each in messages), "every cause"
