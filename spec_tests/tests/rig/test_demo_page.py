"""The demonstration's page, drawn from results made by hand, with no training.

The page belongs to the reference, which the suite does not import: it is drawn by its command.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spec_tests.rig.target import PACKAGE_ROOT, REPOSITORY_ROOT
from spec_tests.tests.rig.browser import require_decent
from spec_tests.tests.rig.demo_results import results
from spec_tests.tests.rig.helpers import python

pytestmark = pytest.mark.skipif(
    not (REPOSITORY_ROOT / "solution" / "demo").is_dir(), reason="no reference beside the suite"
)


def drawn(folder: Path, found: dict[str, Any]) -> Path:
    """The page of those results."""
    (folder / "results.json").write_text(json.dumps(found))
    python("-m", "solution.demo.page", "results.json", "index.html", cwd=folder).check_returncode()
    return folder / "index.html"


def test_the_page_can_be_read_in_a_browser(tmp_path: Path, browser):
    require_decent(browser, drawn(tmp_path, results()))


def test_every_part_is_there_and_what_is_wrong_is_said_in_words(tmp_path: Path):
    found = results(problems=["FAILED: expected equal curves <b>"])
    found["runs"][3]["traffic"]["bytes"] *= 2
    page = drawn(tmp_path, found).read_text(encoding="utf-8")
    titles = ["Loss", "Memory of a rank", "Traffic of a step"]
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == titles
    assert page.count('role="img"') == 2, "charts of curves"
    assert "1 checks failed" in page
    assert "FAILED: expected equal curves &lt;b&gt;" in page
    assert page.count("differs</span>") == 1, "its traffic"


def test_both_pages_wear_the_same_style():
    ours = (PACKAGE_ROOT / "rig" / "report" / "house.css").read_bytes()
    assert ours == (REPOSITORY_ROOT / "solution" / "demo" / "house.css").read_bytes()
