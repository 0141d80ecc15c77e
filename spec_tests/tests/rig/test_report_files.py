"""What programs read: report.json, results.json with the points of a course, and `compare`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from spec_tests.rig import ledger
from spec_tests.rig.report import compare, data, points, render_gradescope, render_json
from spec_tests.tests.rig.logs import MESSAGE, STORY, TOLD, log, profile, result

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


def test_a_report_is_read_from_folder_log_and_json(tmp_path: Path):
    events = log(result("failed"), result(case="w3"))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "report.json").write_text(render_json(events))
    read = [data.read_report(tmp_path / name) for name in ("", "events.jsonl", "report.json")]
    assert read[0] == read[1] == read[2] == data.as_report(events)


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"schema": "trainspec-report/2"}'])
def test_another_file_is_no_report(tmp_path: Path, text: str):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match="expected a report of schema 'trainspec-report/1'"):
        data.read_report(tmp_path / "report.json")


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


@pytest.mark.parametrize("outcome", ["failed", "expected_failure", "not_here", "blocked", "hang"])
def test_only_what_passed_is_worth_points(outcome: str):
    item = {"name": "one", "points": 2, "clauses": [MEAN]}
    found = points.score(log(result(outcome), points=profile(item)), "solution")
    assert found is not None
    assert found["points"] == 0


def test_gradescope_gets_a_test_per_must_clause_where_no_points_were_asked_for():
    events = log(
        result("failed", message=MESSAGE),
        result(clause="a.b"),
        result(clause="a.c", strength="SHOULD"),
        result("not_offered", clause="a.d"),
    )
    found = json.loads(render_gradescope(events))["tests"]
    assert {test["name"]: test["score"] for test in found} == {MEAN: 0, "a.b": 1}


BAD_PROFILES = {
    "no TOML": ("title =", "expected TOML"),
    "no item": ("title = 'x'", "at least one"),
    "typo": ("title='x'\n[[item]]\nname='a'\npoint=1\nclauses=['a.*']", "unknown key 'point'"),
    "negative": ("title='x'\n[[item]]\nname='a'\npoints=-1\nclauses=['a.*']", "points >= 0"),
    "neither": ("title='x'\n[[item]]\nname='a'\npoints=1", "expected clauses, by_hand or both"),
    "level": (
        "title='x'\nlevel='hard'\n[[item]]\nname='a'\npoints=1\nclauses=['a']",
        "expected level in",
    ),
}


@pytest.mark.parametrize("what", BAD_PROFILES)
def test_a_bad_profile_is_refused(tmp_path: Path, what: str):
    text, said = BAD_PROFILES[what]
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        points.load(str(tmp_path / "mine.toml"))
    with pytest.raises(ValueError, match="expected one of course, cs336, effdl or a"):
        points.load("cs999")


# ------------------------------------------------------------------------------------------ compare


def compared(before: list, after: list) -> dict[str, tuple[str, bool]]:
    """Clause to kind of change and whether it decides."""
    found = compare.compare(data.as_report(before), data.as_report(after))
    return {change.clause: (change.kind, change.decides) for change in found}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("passed", "failed", "broke"),
        ("passed", "hang", "broke"),
        ("passed", "expected_failure", "broke"),
        ("passed", "not_offered", "broke"),
        ("passed", "not_here", "unknown"),
        ("passed", "error", "unknown"),
        ("failed", "passed", "mended"),
        ("not_offered", "passed", "mended"),
        ("not_offered", "failed", "new"),
        ("passed", "passed", None),
        ("failed", "failed", None),
        ("failed", "hang", None),
    ],
)
def test_what_became_of_a_case(before: str, after: str, kind: str | None):
    found = compared(log(result(before)), log(result(after)))
    assert found == ({MEAN: (kind, True)} if kind else {})


ONE, TWO = result(clause="a.b"), result("failed", clause="c.d")
SHOULD, ABOVE = {"strength": "SHOULD"}, {"level": "production"}
OLD, NEW = {"implementation": "old.py"}, {"implementation": "new.py"}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (log(ONE), log(ONE, TWO), {"c.d": ("new", True)}),
        (log(ONE, TWO), log(TWO), {"a.b": ("unknown", True)}),
        (log(result(**SHOULD)), log(result("failed", **SHOULD)), {MEAN: ("broke", False)}),
        (log(result(**ABOVE)), log(result("failed", **ABOVE)), {MEAN: ("broke", False)}),
        (
            log(result(**OLD), implementations=["old.py"]),
            log(result("failed", **NEW), implementations=["new.py"]),
            {MEAN: ("broke", True)},
        ),
    ],
    ids=["added", "left out", "advises", "above the level", "one each, of other names"],
)
def test_what_became_of_a_clause(before, after, found):
    assert compared(before, after) == found


def test_one_more_failing_case_of_a_failing_clause_has_broken():
    before = log(result("failed", case="w2"), result(case="w3"))
    after = log(result("failed", case="w2"), result("failed", case="w3", message=MESSAGE))
    [change] = compare.compare(data.as_report(before), data.as_report(after))
    assert (change.kind, change.cases) == ("broke", ("w3",))
    assert change.likely == "summed and not divided"
    assert (change.before, change.after) == ("FAIL (1 of 2 cases)", "FAIL")


def test_reports_without_a_common_implementation_are_refused():
    report = data.as_report(log(result(), implementations=["solution"]))
    other = copy.deepcopy(report)
    other["implementations"] = [{**report["implementations"][0], "name": n} for n in ("a", "b")]
    with pytest.raises(ValueError, match="that both reports judge, got solution before and a, b"):
        compare.compare(report, other)


def test_the_command_compares_whole_reports_alone(tmp_path: Path, capsys):
    """What it says of one that broke or got better is seen in `test_command`."""

    def write(name: str, events: list) -> str:
        (tmp_path / name).write_text(render_json(events))
        return str(tmp_path / name)

    good = write("good.json", log(result()))
    torn = write("torn.json", log(result(), is_finished=False))
    assert compare.main([good, good]) == 0
    assert compare.main([good, torn]) == 2
    assert compare.main([good, str(tmp_path / "nowhere")]) == 2
    assert "expected a folder that --report wrote" in capsys.readouterr().err
