"""What programs read: report.json, results.json with the points of a course, and `compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_tests.rig import ledger
from spec_tests.rig.report import compare, data, points
from spec_tests.rig.report.data import render_json
from spec_tests.rig.report.points import render_gradescope
from spec_tests.tests.rig.logs import MESSAGE, STORY, TOLD, log, result

MEAN = "ddp.gradients.mean"

# -------------------------------------------------------------------------------------- report.json


def test_every_key_that_the_schema_documents_is_there_and_no_other():
    events = log(TOLD, result("failed", message=MESSAGE, margins=[]))
    found = json.loads(render_json(events))
    assert found["implementations"][0]["points"] is None
    [row] = found["clauses"]
    documented = set(data.__doc__.replace('"', " ").replace(":", " ").split())
    case = row["cells"]["solution"]["cases"][0]
    for part in (found, found["verdict"], found["implementations"][0], row, STORY, case):
        assert set(part) <= documented, set(part) - documented
    top = "schema complete verdict run problems implementations clauses"
    assert set(found) == set(top.split())


# ------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize(
    ("name", "of", "items"), [("effdl", 11, 7), ("cs336", 60, 27), ("course", 12, 18)]
)
def test_the_profiles_of_the_courses_name_clauses_that_exist(name: str, of: float, items: int):
    clauses = ledger.load_all()
    musts = {clause.id: clause for clause in clauses if clause.strength == "MUST"}
    read = points.load(name)
    found = points.resolve(read, list(musts))
    judged = [item for item in found["items"] if item["clauses"]]
    assert len(found["items"]) == items
    assert sum(item["points"] for item in judged) == of
    order = ("course", "correct", "production")
    needed = {musts[clause].level for item in judged for clause in item["clauses"]}
    assert max(map(order.index, needed)) <= order.index(read["level"]), "judged by default"


def test_gradescope_gets_a_test_per_must_clause_where_no_points_were_asked_for():
    events = log(
        result("failed", message=MESSAGE),
        result(clause="a.b"),
        result(clause="a.c", strength="SHOULD"),
        result("not_offered", clause="a.d"),
    )
    found = json.loads(render_gradescope(events))["tests"]
    assert {test["name"]: test["score"] for test in found} == {MEAN: 0, "a.b": 1}


ITEM = "title='x'\n[[item]]\nname='a'\n"
BAD_PROFILES = {
    "title =": "expected TOML",
    "title = 'x'": "at least one",
    f"{ITEM}point=1\nclauses=['a.*']": "unknown key 'point'",
    f"{ITEM}points=-1\nclauses=['a.*']": "points >= 0",
    f"{ITEM}points=1": "expected clauses, by_hand or both",
    f"level='hard'\n{ITEM}points=1\nclauses=['a']": "expected level in",
}


@pytest.mark.parametrize(("text", "said"), BAD_PROFILES.items())
def test_a_bad_profile_is_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        points.load(str(tmp_path / "mine.toml"))
    with pytest.raises(ValueError, match="expected one of course, cs336, effdl or a"):
        points.load("cs999")


# ------------------------------------------------------------------------------------------ compare


def compared(before: list, after: list) -> dict[str, tuple[str, bool]]:
    """Clause to kind of change and whether it decides."""
    found = compare.compare(before, after)
    return {change.clause: (change.kind, change.decides) for change in found}


STATES = {
    **dict.fromkeys(("passed failed", "passed hang", "passed expected_failure"), "broke"),
    "passed not_offered": "broke",
    **dict.fromkeys(("passed not_here", "passed error"), "unknown"),
    **dict.fromkeys(("failed passed", "not_offered passed"), "mended"),
    "not_offered failed": "new",
    **dict.fromkeys(("passed passed", "failed failed", "failed hang"), None),
}
"""Outcome before and after to what became of the case."""


def test_what_became_of_a_case():
    found = {}
    for outcomes in STATES:
        before, after = (log(result(outcome)) for outcome in outcomes.split())
        found[outcomes] = compared(before, after).get(MEAN, (None, True))
    assert found == {outcomes: (kind, True) for outcomes, kind in STATES.items()}


def test_what_became_of_a_clause():
    one, two = result(clause="a.b"), result("failed", clause="c.d")
    assert compared(log(one), log(one, two)) == {"c.d": ("new", True)}
    assert compared(log(one, two), log(two)) == {"a.b": ("unknown", True)}
    advises = [log(result(each, strength="SHOULD")) for each in ("passed", "failed")]
    assert compared(*advises) == {MEAN: ("broke", False)}
    renamed = [
        log(result(outcome, implementation=name), implementations=[name])
        for outcome, name in (("passed", "old.py"), ("failed", "new.py"))
    ]
    assert compared(*renamed) == {MEAN: ("broke", True)}


def test_reports_without_a_common_implementation_are_refused():
    one, two = log(result()), log(*(result(implementation=n) for n in "ab"), implementations=[])
    with pytest.raises(ValueError, match="that both reports judge, got solution before and a, b"):
        compare.compare(one, two)


def test_the_command_compares_whole_reports_alone(tmp_path: Path, capsys):
    """What it says of one that broke or got better is seen in `test_command`."""

    def write(name: str, events: list) -> str:
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / name / "events.jsonl").write_text(lines)
        return str(tmp_path / name)

    good, torn = write("good", log(result())), write("torn", log(result(), is_finished=False))
    assert compare.main([good, f"{good}/events.jsonl"]) == 0
    assert compare.main([good, torn]) == 2
    assert compare.main([good, write("empty", [])]) == 2
    assert compare.main([good, str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert "expected a run that reached its end" in said
    assert "expected the log of a run, got no event" in said
    assert "expected a folder that --report wrote, or its events.jsonl, got" in said
