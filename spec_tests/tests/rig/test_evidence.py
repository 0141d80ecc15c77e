"""The folder of evidence: its page and its drawings are fresh, small, and for both schemes."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from spec_tests.rig.target import REPOSITORY_ROOT
from spec_tests.tests.rig.browser import Visit
from spec_tests.tests.rig.helpers import python

EVIDENCE = REPOSITORY_ROOT / "evidence"
pytestmark = pytest.mark.skipif(not EVIDENCE.is_dir(), reason="no evidence beside the suite")


def test_the_page_and_its_drawings_are_what_the_command_draws(tmp_path: Path):
    copy = tmp_path / "evidence"
    shutil.copytree(EVIDENCE, copy, ignore=shutil.ignore_patterns("*.svg", "*.md"))
    ended = python("-m", "solution.demo.evidence", "--draw", "--out", str(copy))
    assert ended.returncode == 0, ended.stderr
    drawn = {path.name: path.read_text() for path in copy.glob("*.*") if path.is_file()}
    kept = {path.name: path.read_text() for path in EVIDENCE.glob("*.*") if path.is_file()}
    assert len(kept) == 5
    assert drawn == kept, "draw it again: python -m solution.demo.evidence --draw"


def test_the_folder_is_small_and_names_no_machine():
    files = [path for path in EVIDENCE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2**20
    for path in EVIDENCE.rglob("*.gz"):
        assert "host_name" not in json.loads(gzip.decompress(path.read_bytes()))


@pytest.mark.parametrize(
    ("scheme", "ink"), [("light", "rgb(29, 35, 39)"), ("dark", "rgb(228, 232, 234)")]
)
def test_the_drawings_are_of_both_schemes(scheme: str, ink: str, browser):
    for path in sorted(EVIDENCE.glob("*.svg")):
        page = Visit(browser, path, color_scheme=scheme).page
        assert page.evaluate("getComputedStyle(document.querySelector('text')).fill") == ink
