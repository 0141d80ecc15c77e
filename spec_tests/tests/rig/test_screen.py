"""What a run shows while it judges, and the ending of a log; no ranks are started.

Causes: failed clauses that show the same are one cause, and nothing is guessed.
"""

from __future__ import annotations

import io
import re
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_tests import __main__ as command
from spec_tests.rig import ledger
from spec_tests.rig.live import Live
from spec_tests.rig.outcomes import Event, is_complete
from spec_tests.rig.progress import Progress
from spec_tests.rig.ranks.errors import DIFFERS
from spec_tests.rig.report.causes import causes
from spec_tests.rig.report.diagnosis import FEW_JUDGED, Dictionary, Families, families
from spec_tests.rig.report.ending import render_ending
from spec_tests.rig.report.eventlog import EventLog, read_log
from spec_tests.rig.report.text import INCOMPLETE, clip
from spec_tests.rig.target import PACKAGE_ROOT
from spec_tests.tests.rig import golden
from spec_tests.tests.rig.helpers import python
from spec_tests.tests.rig.logs import START, add, log, result


def test_live_tells_the_first_finding_progress_and_chapters_as_they_end():
    told: list[str] = []
    said: list[str] = []
    shown: Any = SimpleNamespace(say=said.append, is_to_end=False, close=lambda: None)
    live: Any = Live(told.append, is_mixed=False, shown=shown)
    clauses = ledger.load_all()[:9]
    items = [SimpleNamespace(function=each.test, nodeid=f"{each.id}[w2]") for each in clauses]
    live.pytest_collection_finish(SimpleNamespace(items=items))
    for item in items[:2]:
        live.pytest_runtest_logstart(item.nodeid)
        live.pytest_runtest_logfinish(item.nodeid)
    assert said == [f"{n} of 9 clauses, now {each.id}" for n, each in enumerate(clauses[:2])]
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


@pytest.mark.parametrize(
    ("is_terminal", "written"),
    [
        (True, "\r\x1b[K   0 s  1 of 9 clauses, now a.b\r\r\x1b[Ka finding\n\r\x1b[K"),
        (False, "after 0 min: 1 of 9 clauses, now a.b\na finding\n"),
    ],
)
def test_progress_is_one_line_on_a_terminal_and_appended_to_a_file(is_terminal: bool, written: str):
    stream = io.StringIO()
    shown = Progress(stream, is_terminal=is_terminal)
    shown.say("1 of 9 clauses, now a.b")
    shown.draw()
    with shown.hidden():
        stream.write("a finding\n")
    shown.close()
    assert stream.getvalue() == written


KILLED = """\
import os, signal, sys
from pathlib import Path
from spec_tests.rig.report.eventlog import EventLog, read_log
from spec_tests.tests.rig.logs import MESSAGE, START, add
add(EventLog(Path(sys.argv[1]), **START), "failed", message=MESSAGE)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_ending_of_a_killed_run_is_made_of_its_log(tmp_path: Path, capsys):
    path = tmp_path / "events.jsonl"
    assert python("-c", KILLED, str(path)).returncode == -signal.SIGKILL
    events = read_log(path)
    assert [event["event"] for event in events] == ["header", "result"]
    assert not is_complete(events)
    assert command.main(["report", str(tmp_path), "--to", str(tmp_path / "pages")]) == 2
    said = capsys.readouterr().out
    assert INCOMPLETE in said
    assert "summed and not divided" in said
    assert said.endswith(f"report: {tmp_path}/pages/index.html\n")
    assert INCOMPLETE in (tmp_path / "pages" / "index.html").read_text()
    with closing(EventLog(path, **START)) as log:
        add(log)
        log.finish()
    assert command.main(["report", str(path)]) == 0
    assert command.main(["report", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- causes


TRACE = """[{id}]  A sentence.
rank 0 and 1 of 2 raised {error}
Traceback (most recent call last):
  File "mine.py", line {line}, in finish
    dist.all_reduce(p.grad)
  File "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9, in f
"""
WRONG = """[{id}]  A sentence.
rank 0, 'w' (2,): expected the mean gradient, got 2.000 x it in every element
likely: summed and not divided by the world size
"""
BARE = """[{id}]  A sentence.
rank 0, 'w' (2,): expected the mean gradient, got something else
"""
KIND = "TypeError: expected Tensor, got None"


def failed(id: str, text: str, **fields: object):
    return result("failed", clause=id, message=text.format(id=id, **fields))


def enough(*events: Event) -> list[Event]:
    """As many clauses as it takes for a kind of fault to be named; the others passed."""
    passed = [result("passed", clause=f"ddp.z.n{number}") for number in range(FEW_JUDGED)]
    return log(*events, *passed)


def of_both(clause: str, text: str) -> list[Event]:
    """The same failure of two functions."""
    failure = failed(clause, text, line=3, error=KIND)
    return [failure | {"subject": each, "case": each} for each in ("ddp", "ddp_bucketed")]


LOST = WRONG.replace("summed", "lost")
HALVED = WRONG.replace("the world size", "the world size, or counted twice")
MORE = "[{id}]  A sentence.\nrank 0: expected {what} of at most 5, got {got}\n"
UNSTABLE = f"[{{id}}]  A sentence.\n{DIFFERS}\n"
SUITE = TRACE.replace("mine.py", f"{PACKAGE_ROOT}/rig/clause.py")
TOY = f'  File "{PACKAGE_ROOT}/rig/toys.py", line 36, in forward\n'
CHAINED = """[{id}]  A sentence.
rank 0 of 1 raised {error}
Traceback (most recent call last):
  File "kernel.py", line {inner}, in kernel
    tl.dot(a, b)

The above exception was the direct cause of the following exception:
""" + TRACE.partition("{error}\n")[2]
UNWAITED = "UnwaitedWork: nobody has waited for all_reduce (sizes ({},)), launched at mine.py:60"
BELOW = TRACE.replace("    dist.all_reduce(p.grad)\n", f"    return self.module(x)\n{TOY}")
SIZES = "RuntimeError: size mismatch, got input ({}), mat ({}x6)"
RAISED = failed("ddp.a.raised", TRACE, error=KIND, line=3)
SUMMED = failed("ddp.a.one", WRONG), failed("ddp.a.two", WRONG)
CAUSES: dict[str, list[Event]] = {
    "a line that raises is one cause, whatever it says": log(
        failed("ddp.a.one", TRACE, error="ValueError: the hook raised KeyError: 3", line=12),
        failed("ddp.a.two", TRACE, error="ValueError: another", line=12),
        failed("ddp.a.three", TRACE, error="ValueError: elsewhere", line=90),
    ),
    "errors of a model that one line calls are causes by their words": log(
        failed("ddp.a.one", BELOW, error=SIZES.format(4, 4), line=12),
        failed("ddp.a.two", BELOW, error="RuntimeError: expected the same dtype", line=12),
        failed("ddp.a.three", BELOW, error=SIZES.format(2, 2), line=12),
    ),
    "what an interpreter makes of an error is of the line below": log(
        failed("ddp.a.one", CHAINED, error="InterpreterError: ValueError('2')", line=12, inner=3),
        failed("ddp.a.two", CHAINED, error="InterpreterError: TypeError('3')", line=12, inner=4),
    ),
    "work that nobody waited for is of the line that launched it": log(
        failed("ddp.a.one", SUITE, error=UNWAITED.format(3), line=1),
        failed("ddp.a.two", SUITE, error=UNWAITED.format("6, 7"), line=1),
    ),
    "lines of the suite are nobody's cause": log(failed("ddp.a.b", SUITE, error=KIND, line=1)),
    "what has no diagnosis is joined where it says the same": log(
        *(failed("ddp.a.bare", BARE), *SUMMED),
        failed("ddp.b.bare", BARE.replace("'w' (2,)", "'layer.bias' (3, 1)")),
        failed("ddp.b.zero", BARE.replace("something else", "zero in every element")),
    ),
    "a diagnosis of several causes joins the one that stands alone": log(
        *(failed("ddp.a.one", HALVED), failed("ddp.a.two", WRONG)),
        failed("ddp.b.one", WRONG.replace("summed and not", "not sent; or not")),
    ),
    "a diagnosis of several causes, none of which stands alone": log(failed("ddp.a.one", HALVED)),
    "more of one thing is one cause, of another is another": log(
        failed("ddp.a.one", MORE, what="live bytes", got=7),
        failed("ddp.a.two", MORE, what="live bytes", got=9),
        failed("ddp.a.less", MORE, what="live bytes", got=3),
        failed("ddp.a.messages", MORE, what="messages", got=7),
    ),
    "two functions never share a cause": log(
        *(*of_both("ddp.a.one", WRONG), *of_both("ddp.a.two", WRONG)),
        *of_both("ddp.a.crash", TRACE),
    ),
    "where one case differs no other speaks": log(
        failed("ddp.a.one", WRONG), failed("ddp.a.one", UNSTABLE) | {"case": "second"}
    ),
    "what the exercise asks comes first": log(
        *(failed(f"ddp.a.n{number}", WRONG) for number in range(3)),
        failed("zero1.a.b", LOST) | {"level": "course"},
    ),
    "of a few clauses nothing more is told": log(*SUMMED),
    "a near-miss is named where it fails all of it": enough(*SUMMED),
    "the kind of a fault is told once, where nothing raised": enough(
        RAISED, SUMMED[0], failed("ddp.a.three", LOST)
    ),
    "a kind of fault stands at a cause whose clauses speak of it": enough(
        failed("ddp.a.none", WRONG.replace("summed", "cast")), SUMMED[0]
    ),
    "what raised is of no kind": enough(RAISED),
    "what differs is of no kind": enough(failed("ddp.a.one", UNSTABLE)),
    "an error of the rig is of no kind": enough(result("error", clause="ddp.a.one")),
}


@pytest.fixture
def known(monkeypatch):
    """All that fails is of one family, and one near-miss fails two clauses.

    `ddp.a.none` speaks of another family.
    """
    speaks = dict.fromkeys(("ddp.a.one", "ddp.a.two"), "wrong-divisor stale")
    known_ones = Families(families().says, {"ddp.a.none": "precision", **speaks}, {})
    monkeypatch.setattr("spec_tests.rig.report.causes.families", lambda: known_ones)
    twice = "likely: summed and not divided by the world size"
    signatures = {"ddp.sum-for-mean": {"ddp.a.one": twice, "ddp.a.two": twice}}
    monkeypatch.setattr("spec_tests.rig.report.causes.dictionary", lambda: Dictionary(signatures))
    monkeypatch.setattr(Families, "named", lambda *_, **__: ("wrong-divisor",))


@pytest.mark.usefixtures("known")
def test_the_causes_of_what_failed_are_as_they_were_kept():
    lines = []
    for name, events in CAUSES.items():
        lines.append(f"---------- {name}")
        for cause in causes(events, "solution"):
            told = [f"{cause.kind or 'finding'}: {cause.title}", *cause.families, cause.like]
            lines.append("; ".join(filter(None, told)))
            cases = ((cell.clause, cell.decisive_cases[0]["case"]) for cell in cause.cells)
            lines.append(f"    {', '.join(f'{clause} {case}' for clause, case in cases)}")
    golden.check("report/causes.txt", "\n".join(lines))


@pytest.mark.usefixtures("known")
def test_an_ending_counts_causes_and_says_what_they_are_like():
    of_two = CAUSES["two functions never share a cause"]
    assert "4 causes explain 3 failed clauses" in render_ending(of_two)
    assert "probably" not in render_ending(enough(RAISED))
    assert "like ddp.sum-for-mean: " in render_ending(enough(*SUMMED))
    told = render_ending(CAUSES["the kind of a fault is told once, where nothing raised"])
    assert told.count("probably wrong-divisor: a reduced or averaged value is off") == 1


def test_the_terminal_ends_with_the_causes_in_at_most_forty_lines():
    events = log(
        *(failed(f"ddp.a.n{number}", WRONG) for number in range(9)),
        *(failed(f"ddp.b.n{number}", BARE.replace("mean", "x" * number)) for number in range(60)),
    )
    shown = render_ending(events)
    ending = shown.partition("1 cause explains 9 failed clauses of solution")[2].splitlines()
    assert 20 < len(ending) <= 40
    assert "    correct: ddp.a.n0, ddp.a.n1, ddp.a.n2 and 6 more" in ending
    assert ending[-1].endswith("more lines: --all, or the report")
    assert "likely: " not in shown
    assert "\n 2  not explained: rank 0, 'w' (2,): expected the " in shown
    whole = render_ending(events, everything=True)
    assert " more" not in whole, "nothing is enumerated in part"
    assert whole.count("likely: ") == 9
    assert render_ending(events[:3]).count("likely: ") == 1, "few findings are shown in full"


def test_an_ending_shows_each_finding_once_however_long_it_is():
    for several in ("a", "abcd"):
        texts = [BARE.replace("something", letter * 90) for letter in several]
        shown = render_ending(log(*(failed(f"ddp.{text[-9]}", text) for text in texts)))
        assert all(shown.count(f"got {letter * 90}") == 1 for letter in several), shown
        assert all(shown.count(f"got {letter}") == 1 for letter in several), shown


def test_a_message_that_is_cut_keeps_the_frames_of_the_judged_code_and_its_end():
    others = [f'  File "/v/site-packages/torch/{i}.py", line {i}, in f\n    g()' for i in range(30)]
    own = '  File "/v/mine.py", line 37, in hook\n    raise RuntimeError'
    text = "\n".join(["rank 0 raised", *others[:15], own, *others[15:], "RuntimeError", "again: x"])
    left_out = "... 60 lines left out; the log of a --report has them"
    assert clip(text, 9).splitlines() == [
        *("rank 0 raised", left_out, *own.splitlines()),
        *("  ...", "RuntimeError", "again: x"),
    ]
    for limit in (3, 8):
        cut = clip("\n".join(map(str, range(99))), limit).splitlines()
        assert (len(cut), cut[0], cut[-1]) == (limit, "0", "98")
