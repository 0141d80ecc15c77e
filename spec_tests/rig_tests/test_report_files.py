"""What programs read: report.json, results.json with the points of a course, and `compare`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from spec_tests import ledger
from spec_tests.rig.report import compare, data, points, render_gradescope, render_json
from spec_tests.rig_tests.logs import MESSAGE, STORY, TOLD, log, profile, result

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
    assert {
        "schema",
        "complete",
        "verdict",
        "run",
        "problems",
        "implementations",
        "clauses",
    } == set(found)


def test_an_incomplete_log_makes_a_report_without_verdict():
    found = json.loads(render_json(log(result(), is_finished=False)))
    assert found["complete"] is False
    assert found["verdict"]["status"] == 2
    assert "INCOMPLETE" in found["verdict"]["text"]


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


def test_points_name_the_level_that_their_profile_needs():
    item = {"name": "one", "points": 2, "clauses": ["ddp.gradients.mean"]}
    profiles = {level: profile(item, level=level) for level in ("course", "production")}
    said = {
        level: points.render_points(log(result(), levels={"solution": "course"}, points=asked))
        for level, asked in profiles.items()
    }
    assert "this profile needs --level production; judged at course" in said["production"]
    assert "--level" not in said["course"]


@pytest.mark.parametrize("outcome", ["failed", "expected_failure", "not_here", "blocked", "hang"])
def test_only_what_passed_is_worth_points(outcome: str):
    item = {"name": "one", "points": 2, "clauses": ["ddp.gradients.mean"]}
    found = points.score(log(result(outcome), points=profile(item)), "solution")
    assert found is not None
    assert found["points"] == 0


def test_an_incomplete_log_is_worth_no_point():
    item = {"name": "one", "points": 2, "clauses": ["ddp.gradients.mean"]}
    events = log(result(), points=profile(item), is_finished=False)
    found = json.loads(render_gradescope(events))
    assert [test["score"] for test in found["tests"]] == [0]
    assert "INCOMPLETE" in found["output"]


def test_gradescope_gets_a_test_per_must_clause_where_no_points_were_asked_for():
    events = log(
        result("failed", message=MESSAGE),
        result(clause="a.b"),
        result(clause="a.c", strength="SHOULD"),
        result("not_offered", clause="a.d"),
    )
    found = json.loads(render_gradescope(events))["tests"]
    assert {test["name"]: test["score"] for test in found} == {"ddp.gradients.mean": 0, "a.b": 1}


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


def test_a_pattern_that_matches_nothing_is_refused():
    one = {"title": "x", "item": [{"name": "a", "points": 1, "clauses": ["ddp.gradient.*"]}]}
    with pytest.raises(ValueError, match=r"no MUST clause matches 'ddp\.gradient\.\*'"):
        points.resolve(one, ["ddp.gradients.mean"])


def test_an_unknown_profile_is_refused():
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
    assert found == ({"ddp.gradients.mean": (kind, True)} if kind else {})


def test_one_more_failing_case_of_a_failing_clause_has_broken():
    before = log(result("failed", case="w2"), result(case="w3"))
    after = log(result("failed", case="w2"), result("failed", case="w3", message=MESSAGE))
    [change] = compare.compare(data.as_report(before), data.as_report(after))
    assert (change.kind, change.cases) == ("broke", ("w3",))
    assert change.likely == "summed and not divided"
    assert (change.before, change.after) == ("FAIL 1/2", "FAIL 2")


def test_what_was_left_out_before_or_after_is_told_apart():
    one, two = result(clause="a.b"), result("failed", clause="c.d")
    assert compared(log(one), log(one, two)) == {"c.d": ("new", True)}
    assert compared(log(one, two), log(two)) == {"a.b": ("unknown", True)}


@pytest.mark.parametrize("fields", [{"strength": "SHOULD"}, {"level": "production"}])
def test_what_advises_or_lies_above_the_level_does_not_decide(fields):
    found = compared(log(result(**fields)), log(result("failed", **fields)))
    assert found == {"ddp.gradients.mean": ("broke", False)}


def test_one_implementation_each_is_compared_whatever_their_names():
    before = log(result(implementation="old.py"), implementations=["old.py"])
    after = log(result("failed", implementation="new.py"), implementations=["new.py"])
    assert compared(before, after) == {"ddp.gradients.mean": ("broke", True)}


def test_reports_without_a_common_implementation_are_refused():
    report = data.as_report(log(result(), implementations=["solution"]))
    other = copy.deepcopy(report)
    other["implementations"] = [{**report["implementations"][0], "name": n} for n in ("a", "b")]
    with pytest.raises(ValueError, match="that both reports judge, got solution before and a, b"):
        compare.compare(report, other)


def test_the_command_says_what_broke_and_returns_one(tmp_path: Path, capsys):
    def write(name: str, events: list) -> str:
        (tmp_path / name).write_text(render_json(events))
        return str(tmp_path / name)

    good, bad = write("good.json", log(result())), write("bad.json", log(result("failed")))
    torn = write("torn.json", log(result(), is_finished=False))
    assert compare.main([good, bad]) == 1
    assert "- ddp.gradients.mean on solution: pass → FAIL" in capsys.readouterr().out
    assert compare.main([bad, good]) == 0
    assert "## What got better: 1" in capsys.readouterr().out
    assert compare.main([good, good]) == 0
    assert compare.main([good, torn]) == 2
    assert compare.main([good, str(tmp_path / "nowhere")]) == 2
    assert "expected a folder that --report wrote" in capsys.readouterr().err
