"""Outcomes, cells, exit status, causes of what failed, and the renderings of a log.

Whole renderings are kept in `goldens/report`; see `golden` for how to write them anew. Failed
clauses that show the same are one cause, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spec_tests.rig.outcomes import Event, Outcome, compose, judge_run, verdict
from spec_tests.rig.ranks.errors import DIFFERS
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
from spec_tests.rig.report.causes import causes
from spec_tests.rig.report.diagnosis import FEW_JUDGED, Dictionary, Families
from spec_tests.rig.report.eventlog import EventLog
from spec_tests.rig.report.text import clip
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


def test_one_line_that_raises_is_one_cause_whatever_it_says():
    kind = "ValueError: the hook raised KeyError: 3"  # named by its first words
    events = log(
        failed("ddp.a.one", TRACE, error=kind, line=12),
        failed("ddp.a.two", TRACE, error="ValueError: another", line=12),
        failed("ddp.a.three", TRACE, error="ValueError: elsewhere", line=90),
    )
    found = causes(events, "solution")
    assert [cause.clauses for cause in found] == [["ddp.a.one", "ddp.a.two"], ["ddp.a.three"]]
    assert found[0].text == f"mine.py:12 raises {kind}"


def test_one_diagnosis_is_one_cause_and_what_has_none_is_joined_where_it_says_the_same():
    other = BARE.replace("'w' (2,)", "'layer.bias' (3, 1)")
    found = causes(
        log(
            failed("ddp.a.bare", BARE),
            failed("ddp.a.one", WRONG),
            failed("ddp.a.two", WRONG),
            failed("ddp.b.bare", other),
            failed("ddp.b.zero", BARE.replace("something else", "zero in every element")),
        ),
        "solution",
    )
    assert [(cause.clauses, cause.is_explained) for cause in found] == [
        (["ddp.a.one", "ddp.a.two"], True),
        (["ddp.a.bare", "ddp.b.bare"], False),
        (["ddp.b.zero"], False),
    ]


def test_a_diagnosis_that_names_several_causes_joins_the_one_that_stands_alone():
    halved = WRONG.replace("the world size", "the world size, or counted twice")
    other = WRONG.replace("summed and not", "not sent; or not")
    events = log(
        failed("ddp.a.one", halved), failed("ddp.a.two", WRONG), failed("ddp.b.one", other)
    )
    found = [(cause.text, cause.clauses) for cause in causes(events, "solution")]
    assert found == [
        ("summed and not divided by the world size", ["ddp.a.two", "ddp.a.one"]),
        ("not sent; or not divided by the world size", ["ddp.b.one"]),
    ]
    (vague,) = causes(log(failed("ddp.a.one", halved)), "solution")
    assert vague.text == "summed and not divided by the world size, or counted twice"


def test_more_of_one_thing_is_one_cause_and_of_another_is_another():
    more = "[{id}]  A sentence.\nrank 0: expected {what} of at most 5, got {got}\n"
    events = log(
        failed("ddp.a.one", more, what="live bytes", got=7),
        failed("ddp.a.two", more, what="live bytes", got=9),
        failed("ddp.a.less", more, what="live bytes", got=3),
        failed("ddp.a.messages", more, what="messages", got=7),
    )
    found = [cause.clauses for cause in causes(events, "solution")]
    assert found == [["ddp.a.one", "ddp.a.two"], ["ddp.a.less"], ["ddp.a.messages"]]


def test_two_functions_never_share_a_cause_and_each_line_names_its_own():
    events = [
        failed(clause, text, line=3, error=KIND) | {"subject": subject, "case": subject}
        for clause, text in (("ddp.a.one", WRONG), ("ddp.a.two", WRONG), ("ddp.a.crash", TRACE))
        for subject in ("ddp", "ddp_bucketed")
    ]
    found = causes(log(*events), "solution")
    assert [(cause.title, cause.clauses) for cause in found] == [
        (f"{subject}: {text}", clauses)
        for text, clauses in (
            ("summed and not divided by the world size", ["ddp.a.one", "ddp.a.two"]),
            (f"mine.py:3 raises {KIND}", ["ddp.a.crash"]),
        )
        for subject in ("ddp", "ddp_bucketed")
    ]
    assert {case["case"] for c in found for cell in c.cells for case in cell.cases} == {
        "ddp",
        "ddp_bucketed",
    }
    assert [c.first.cases[0]["case"] for c in found] == ["ddp", "ddp_bucketed"] * 2
    ending = render_ending(log(*events))
    assert "4 causes explain 3 failed clauses" in ending


def enough(*events: Event) -> list[Event]:
    """As many clauses as it takes for a kind of fault to be named; the others passed."""
    passed = [result("passed", clause=f"ddp.z.n{number}") for number in range(FEW_JUDGED)]
    return log(*events, *passed)


@pytest.fixture
def known(monkeypatch):
    """All that fails is of one family, and one near-miss fails two clauses."""
    twice = "likely: summed and not divided by the world size"
    signatures = {"ddp.sum-for-mean": {"ddp.a.one": twice, "ddp.a.two": twice}}
    monkeypatch.setattr("spec_tests.rig.report.causes.dictionary", lambda: Dictionary(signatures))
    monkeypatch.setattr(Families, "named", lambda *_, **__: ("wrong-divisor",))


@pytest.mark.usefixtures("known")
def test_the_kind_of_a_function_s_fault_is_told_once_where_nothing_raised():
    other = WRONG.replace("summed", "lost")
    found = causes(
        enough(
            failed("ddp.a.raised", TRACE, error=KIND, line=3),
            failed("ddp.a.one", WRONG),
            failed("ddp.a.three", other),
        ),
        "solution",
    )
    assert {cause.text: cause.families for cause in found} == {
        f"mine.py:3 raises {KIND}": (),
        "summed and not divided by the world size": ("wrong-divisor",),
        "lost and not divided by the world size": (),
    }
    assert {cause.like for cause in found} == {""}
    raised = enough(failed("ddp.a.raised", TRACE, error=KIND, line=3))
    differs = enough(failed("ddp.a.one", f"[{{id}}]  A sentence.\n{DIFFERS}\n"))
    rig = enough(result("error", clause="ddp.a.one"))
    for events in (raised, differs, rig):
        (cause,) = causes(events, "solution")
        assert (cause.families, cause.like) == ((), "")
        assert "probably" not in render_ending(events)


@pytest.mark.usefixtures("known")
def test_a_near_miss_is_named_where_it_fails_all_of_it_and_is_of_the_family(monkeypatch):
    events = enough(failed("ddp.a.one", WRONG), failed("ddp.a.two", WRONG))
    (cause,) = causes(events, "solution")
    assert cause.like == "ddp.sum-for-mean"
    assert "like ddp.sum-for-mean: " in render_ending(events)
    monkeypatch.setattr(Families, "named", lambda *_, **__: ("stale", "wrong-divisor"))
    (cause,) = causes(events, "solution")
    assert (cause.like, cause.families) == ("", ("stale", "wrong-divisor"))
    assert "probably stale: an old value is used where a newer one exists; or" in render_ending(
        events
    )


def test_of_a_clause_that_differs_in_one_case_no_other_case_speaks():
    differing = failed("ddp.a.one", f"[{{id}}]  A sentence.\n{DIFFERS}\n") | {"case": "second"}
    (cause,) = causes(log(failed("ddp.a.one", WRONG), differing), "solution")
    assert (cause.text, cause.kind) == (DIFFERS, "differs")
    assert cause.first.decisive_cases[0]["case"] == "second"


@pytest.mark.usefixtures("known")
def test_of_a_few_clauses_nothing_is_told():
    events = log(failed("ddp.a.one", WRONG), failed("ddp.a.two", WRONG))
    (cause,) = causes(events, "solution")
    assert (cause.like, cause.families) == ("", ())


def test_what_the_exercise_asks_comes_first():
    text = WRONG.replace("summed", "lost")
    events = log(
        *(failed(f"ddp.a.n{number}", WRONG) for number in range(3)),
        result("failed", clause="zero1.a.b", level="course", message=text.format(id="zero1.a.b")),
    )
    assert [cause.first.level for cause in causes(events, "solution")] == ["course", "correct"]


def test_the_terminal_ends_with_the_causes_in_at_most_forty_lines():
    events = log(
        *(failed(f"ddp.a.n{number}", WRONG) for number in range(9)),
        *(failed(f"ddp.b.n{number}", BARE.replace("mean", "x" * number)) for number in range(60)),
    )
    counted = (
        "1 cause explains 9 failed clauses of solution; 60 findings are not explained (60 clauses)"
    )
    ending = render_ending(events).partition(counted)[2].splitlines()
    assert len(ending) <= 40
    assert ending[1] == " 1  summed and not divided by the world size"
    assert ending[2].endswith("got 2.000 x it in every element")
    assert ending[3].startswith("    probably wrong-divisor: a reduced or averaged value is off")
    assert ending[4] == "    correct: ddp.a.n0, ddp.a.n1, ddp.a.n2 and 6 more"
    assert ending[-1].endswith("more lines: --all, or the report")
    assert "likely: " not in render_ending(events)
    assert render_ending(events, everything=True).count("likely: ") == 9
    assert render_ending(events[:3]).count("likely: ") == 1, "few findings are shown in full"


def test_a_message_that_is_cut_keeps_the_frames_of_the_judged_code_and_its_end():
    others = [f'  File "/v/site-packages/torch/{i}.py", line {i}, in f\n    g()' for i in range(30)]
    own = '  File "/v/mine.py", line 37, in hook\n    raise RuntimeError'
    text = "\n".join(["rank 0 raised", *others[:15], own, *others[15:], "RuntimeError", "again: x"])

    shown = clip(text, 9).splitlines()

    left_out = "... 60 lines left out; the log of a --report has them"
    end = ["  ...", "RuntimeError", "again: x"]
    assert shown == ["rank 0 raised", left_out, *own.splitlines(), *end]
    for without in ("\n".join(others), "\n".join(map(str, range(99)))):
        for limit in (3, 8, 9):
            cut = clip(without, limit).splitlines()
            assert (len(cut), cut[0]) == (limit, without.splitlines()[0])
            assert cut[-1] == without.splitlines()[-1]


def test_lines_of_the_suite_are_nobodys_cause():
    suite = TRACE.replace("mine.py", __file__.replace("tests/rig/test_report", "rig/clause"))
    (cause,) = causes(log(failed("ddp.a.b", suite, error=KIND, line=1)), "solution")
    assert cause.text == KIND
