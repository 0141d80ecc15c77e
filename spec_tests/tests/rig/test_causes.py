"""Causes: failed clauses that show the same are one cause, and nothing is guessed."""

from __future__ import annotations

import pytest

from spec_tests.rig.outcomes import Event
from spec_tests.rig.ranks.errors import DIFFERS
from spec_tests.rig.report import render_ending
from spec_tests.rig.report.causes import causes
from spec_tests.rig.report.diagnosis import FEW_JUDGED, Dictionary, Families, families
from spec_tests.rig.report.text import clip
from spec_tests.rig.target import PACKAGE_ROOT
from spec_tests.tests.rig.logs import log, result

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


def test_errors_of_a_model_that_one_line_calls_are_causes_by_their_words():
    toy = f'  File "{PACKAGE_ROOT}/rig/toys.py", line 36, in forward\n'
    below = TRACE.replace("    dist.all_reduce(p.grad)\n", f"    return self.module(x)\n{toy}")
    sizes = "RuntimeError: size mismatch, got input ({}), mat ({}x6)"
    events = log(
        failed("ddp.a.one", below, error=sizes.format(4, 4), line=12),
        failed("ddp.a.two", below, error="RuntimeError: expected the same dtype", line=12),
        failed("ddp.a.three", below, error=sizes.format(2, 2), line=12),
    )
    found = causes(events, "solution")
    assert [cause.clauses for cause in found] == [["ddp.a.one", "ddp.a.three"], ["ddp.a.two"]]
    assert found[0].text == f"a module that mine.py:12 calls raises {sizes.format(4, 4)}"


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
    """All that fails is of one family, and one near-miss fails two clauses.

    `ddp.a.none` speaks of another family.
    """
    speaks = dict.fromkeys(("ddp.a.one", "ddp.a.two"), "wrong-divisor stale")
    clauses = {"ddp.a.none": "precision", "ddp.a.late": "stale", **speaks}
    known_ones = Families(families().says, clauses, {})
    monkeypatch.setattr("spec_tests.rig.report.causes.families", lambda: known_ones)
    twice = "likely: summed and not divided by the world size"
    signatures = {"ddp.sum-for-mean": {"ddp.a.one": twice, "ddp.a.two": twice}}
    monkeypatch.setattr("spec_tests.rig.report.causes.dictionary", lambda: Dictionary(signatures))
    monkeypatch.setattr(Families, "named", lambda *_, **__: ("wrong-divisor",))
    return known_ones


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


def test_a_kind_of_fault_stands_at_a_cause_whose_clauses_speak_of_it(monkeypatch, known):
    cast, late = WRONG.replace("summed", "cast"), WRONG.replace("summed", "late")
    first = failed("ddp.a.none", cast)
    told = {
        cause.clauses[0]: cause.families
        for cause in causes(enough(first, failed("ddp.a.one", WRONG)), "solution")
    }
    assert told == {"ddp.a.none": (), "ddp.a.one": ("wrong-divisor",)}
    (cause,) = causes(enough(first), "solution")
    assert (cause.families, cause.like) == ((), "")

    monkeypatch.setattr(Families, "named", lambda *_, **__: ("wrong-divisor", "stale"))
    apart = enough(first, failed("ddp.a.late", late), failed("ddp.b.other", WRONG))
    told = {cause.clauses[0]: cause.families for cause in causes(apart, "solution")}
    # Of the other one no clause speaks: it stays an alternative of the one that is told.
    assert told["ddp.a.late"] == ("wrong-divisor", "stale")
    apart = enough(first, failed("ddp.a.late", late), failed("ddp.a.one", WRONG))
    known.clauses["ddp.a.one"] = "wrong-divisor"
    told = {cause.clauses[0]: cause.families for cause in causes(apart, "solution")}
    assert told["ddp.a.late"] == ("stale",)
    assert told["ddp.a.one"] == ("wrong-divisor",)


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
    suite = TRACE.replace("mine.py", f"{PACKAGE_ROOT}/rig/clause.py")
    (cause,) = causes(log(failed("ddp.a.b", suite, error=KIND, line=1)), "solution")
    assert cause.text == KIND
