"""`submit` packs a course's hand-in, `autograder` writes what judges each one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spec_tests.rig import autograder, submit
from spec_tests.tests.rig.helpers import CHECKOUTS, ROOT, faulty_checkout, forked

ITEM = "FlashAttention-2, backward"  # with the fewest clauses
LEVEL = ("--level", "course")
CLAUSES = ("--clause", "attention.shapes.without-heads,attention.gradients.values", *LEVEL)
OWN_TEST = """\
from importlib.util import find_spec
def test_of_the_course():
    assert find_spec("tests.adapters")
"""


def add_rest(folder: Path) -> None:
    """Add a test of its own to a hand-in, and what nobody hands in."""
    (folder / "tests" / "test_all.py").write_text(OWN_TEST)
    for junk in ("weights.pt", ".venv/bin/python", "cs336_systems/__pycache__/a.pyc", ".env"):
        (folder / junk).parent.mkdir(parents=True, exist_ok=True)
        (folder / junk).write_text("not to be handed in")


def test_a_checkout_is_judged_and_packed_though_a_clause_fails(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", forked)
    mine, out = faulty_checkout(folder := tmp_path / "my work"), tmp_path / "hand-in.zip"
    add_rest(folder)
    clause = ("--clause", "ddp.gradients.frozen-stay-none", "--transport", "sim", *LEVEL)
    assert submit.main([mine, str(out), *clause]) == 1
    with zipfile.ZipFile(out) as archive:
        names = set(archive.namelist())
        own, ours = (
            ElementTree.fromstring(archive.read(name))
            for name in ("test_results.xml", "trainspec/junit.xml")
        )
        results = json.loads(archive.read("trainspec/results.json"))
        assert "failed" in archive.read("trainspec/summary.md").decode()
    assert {"tests/adapters.py", "cs336_systems/ddp.py", "trainspec/index.html"} <= names
    assert not {name for name in names if "not to be" in name or name.endswith((".pt", ".pyc"))}
    assert not {name for name in names if name.startswith(".") or "/." in name}
    assert [case.get("name") for case in own.iter("testcase")] == ["test_of_the_course"]
    assert len([*ours.iter("testcase")]) >= 2
    assert results["extra_data"]["implementation"] == mine


@pytest.mark.parametrize("status", [0, 2])
def test_what_was_judged_is_packed_and_the_status_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
):
    ended = subprocess.CompletedProcess[str]([], status)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    out = tmp_path / "hand-in.zip"
    assert submit.main([f"cs336:{CHECKOUTS / 'cs336_2026'}", str(out)]) == status
    assert out.exists() == (status == 0)
    assert "tests of the course: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("solution", "a.zip"), ("cs336:nowhere", "a.zip"), ("cs336:.", "a.tar")]
)
def test_what_cannot_be_packed_is_refused(words: tuple[str, ...], capsys):
    with pytest.raises(SystemExit, match="2"):
        submit.main(words)
    assert "expected" in capsys.readouterr().err


def written(folder: Path, *words: str) -> Path:
    assert autograder.main([str(folder), "--install", "trainspec[test]", *words]) == 0
    return folder


def graded(grader: Path, root: Path) -> dict:
    """What Gradescope would show of `root/submission`."""
    environment = {**os.environ, "AUTOGRADER": str(root), "PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(ROOT)}
    subprocess.run([grader / "run_autograder"], cwd=root, env=environment, check=True)
    return json.loads((root / "results" / "results.json").read_text())


def test_gradescope_gets_the_points_of_a_hand_in_that_lies_in_a_folder(tmp_path):
    grader = written(tmp_path / "grader", "--cpus", "1", *CLAUSES, "-n", "0", "--transport", "sim")
    hand_in = tmp_path / "submission" / "my work"
    add_rest(shutil.copytree(CHECKOUTS / "cs336_2026", hand_in))
    found = graded(grader, tmp_path)
    assert "INCOMPLETE" not in found["output"]
    (item,) = (test for test in found["tests"] if test["name"] == ITEM)
    assert (item["score"], item["max_score"]) == (5, 5)


def test_gradescope_is_told_of_a_hand_in_without_the_files(tmp_path: Path):
    (tmp_path / "submission").mkdir()
    found = graded(written(tmp_path / "grader", "--course", "course"), tmp_path)
    assert found["score"] == 0
    assert "model/my_gpt2.py" in found["output"]


def test_the_files_limit_processors_and_time_and_are_of_their_kind(tmp_path: Path):
    grader = written(tmp_path / "grader", "--cpus", "3", "--minutes", "7", "--level", "course")
    for name in ("setup.sh", "run_autograder"):
        assert os.access(grader / name, os.X_OK)
        subprocess.run(["bash", "-n", grader / name], check=True)
    judging = [(grader / name).read_text() for name in ("run_autograder", "trainspec.yml")]
    for text in judging:
        assert "taskset -c 0-2" in text
        assert 'timeout --kill-after=60 7m "$PYTHON" -m spec_tests' in text
        assert "--points cs336 -n 3 --level course" in text
    assert "timeout-minutes: 17" in judging[1]
    assert "'trainspec[test]'" in (grader / "setup.sh").read_text()


def test_the_workflow_is_yaml(tmp_path: Path):
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((written(tmp_path / "grader") / "trainspec.yml").read_text())["jobs"]
    assert [step for step in jobs["judge"]["steps"] if "spec_tests" in step.get("run", "")]
