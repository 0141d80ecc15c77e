"""Failed clauses that show the same are one cause, and nothing is guessed."""

from __future__ import annotations

from spec_tests.rig.report import render_ending
from spec_tests.rig.report.causes import causes
from spec_tests.rig_tests.logs import log, result

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


def test_one_diagnosis_is_one_cause_and_none_is_a_cause_of_its_own():
    found = causes(
        log(
            failed("ddp.a.bare", BARE),
            failed("ddp.a.one", WRONG),
            failed("ddp.a.two", WRONG),
            failed("ddp.b.bare", BARE),
        ),
        "solution",
    )
    assert [cause.clauses for cause in found] == [
        ["ddp.a.one", "ddp.a.two"],
        ["ddp.a.bare"],
        ["ddp.b.bare"],
    ]


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
        *(failed(f"ddp.b.n{number}", BARE) for number in range(60)),
    )
    ending = render_ending(events).partition("61 causes explain 69 failed clauses")[2].splitlines()
    assert len(ending) <= 40
    assert ending[1] == " 1  summed and not divided by the world size"
    assert ending[2].endswith("got 2.000 x it in every element")
    assert ending[3] == "    correct: ddp.a.n0, ddp.a.n1, ddp.a.n2 and 6 more"
    assert ending[-1].endswith("more causes: --all, or the report")
    assert "likely: " not in render_ending(events)
    assert render_ending(events, everything=True).count("likely: ") == 1
    assert render_ending(events[:3]).count("likely: ") == 1, "few findings are shown in full"


def test_lines_of_the_suite_are_nobodys_cause():
    suite = TRACE.replace("mine.py", __file__.replace("rig_tests/test_causes", "clause"))
    (cause,) = causes(log(failed("ddp.a.b", suite, error=KIND, line=1)), "solution")
    assert cause.text == KIND
