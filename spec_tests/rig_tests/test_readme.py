"""README is executed: its numbers are counted, its commands exist, its example is judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spec_tests import impostors, ledger
from spec_tests.rig.judge import expectations
from spec_tests.rig.outcomes import Outcome, compose, results
from spec_tests.rig.report.eventlog import read_log
from spec_tests.target import PACKAGE_ROOT, REPOSITORY_ROOT

README = REPOSITORY_ROOT / "README.md"

pytestmark = pytest.mark.skipif(
    not README.is_file(), reason="an installed suite has no README beside it"
)


def block(language: str, first_words: str, page: Path = README) -> str:
    """The fenced block of a page that begins with the given words."""
    for found in re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if found.startswith(first_words):
            return found
    raise AssertionError(f"{page} has no {language} block that begins with {first_words!r}")


def test_the_numbers_of_the_first_screen_are_counted():
    text = README.read_text()

    counted = ledger.with_counts(text, ledger.load_all(), *impostors.counts())

    assert text == counted, "stale numbers in README.md: run python -m spec_tests ledger"
    assert "clauses**" in text


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README.read_text()


def test_the_table_of_defects_names_clauses_and_files_that_exist():
    folder = REPOSITORY_ROOT / "spec_tests"
    named = set(re.findall(r"`([\w./-]+)`", (folder / "DEFECTS.md").read_text()))
    known = {clause.id for clause in ledger.load_all()}

    clauses = {name for name in named if re.fullmatch(r"[a-z0-9]+(\.[a-z0-9-]+){2}", name)}
    files = {name for name in named if name.startswith("reference_tests/")}

    assert len(clauses) > 30
    assert clauses <= known, clauses - known
    assert [name for name in files if not (folder / name).is_file()] == []


def test_every_make_target_that_is_named_exists():
    makefile = (REPOSITORY_ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))

    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README.read_text(), flags=re.MULTILINE))

    assert named <= targets


def test_the_expectations_example_is_valid(tmp_path):
    text = block("toml", "[[deviation]]", PACKAGE_ROOT / "README.md")
    file = tmp_path / "mine.toml"
    file.write_text(text)

    [deviation] = expectations.load(file)

    assert tomllib.loads(text)
    assert deviation.clause in {clause.id for clause in ledger.load_all()}


def test_the_example_is_told_its_three_faults_and_the_transcript_is_real(tmp_path):
    (tmp_path / "mine.py").write_text(block("python", "# mine.py"))
    wanted = ["ddp.gradients.mean", "ddp.gradients.frozen-stay-none", "ddp.group.*"]
    options = [word for pattern in wanted for word in ("--clause", pattern)]

    ran = subprocess.run(
        [sys.executable, "-m", "spec_tests", "--impl", "mine.py", "--report", "out", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY_ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert ran.returncode == 1, ran.stdout + ran.stderr
    cells: dict[str, list[str]] = {}
    for event in results(read_log(tmp_path / "out" / "events.jsonl")):
        cells.setdefault(event["clause"], []).append(event["outcome"])
    assert {clause: str(compose(map(Outcome, found))) for clause, found in cells.items()} == {
        "ddp.gradients.mean": "failed",
        "ddp.gradients.frozen-stay-none": "failed",
        "ddp.group.divides-by-its-size": "failed",
        "ddp.group.keeps-to-itself": "passed",  # by its error, which is allowed there
        "ddp.group.starts-from-its-first-rank": "passed",
    }
    transcript = block("text", "[ddp.gradients.mean]").rstrip().splitlines()
    missing = [line for line in transcript if line not in ran.stdout]
    assert not missing, f"README's transcript is not what is printed: {missing}"
