"""The demonstration's page, in a real browser: drawn from results made by hand, with no training.

The page belongs to the reference, which the suite does not import: it is drawn by its command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_tests.rig.target import PACKAGE_ROOT, REPOSITORY_ROOT
from spec_tests.tests.rig.browser import Visit, require_decent
from spec_tests.tests.rig.demo_results import KINDS, results
from spec_tests.tests.rig.helpers import python

pytestmark = pytest.mark.skipif(
    not (REPOSITORY_ROOT / "solution" / "demo").is_dir(), reason="no reference beside the suite"
)


def drawn(folder: Path, found: dict[str, Any]) -> Path:
    """The page of those results."""
    (folder / "results.json").write_text(json.dumps(found))
    python("-m", "solution.demo.page", "results.json", "index.html", cwd=folder).check_returncode()
    return folder / "index.html"


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page with every part."""
    return drawn(tmp_path_factory.mktemp("demo"), results())


def test_the_page_is_decent_with_every_part_and_with_few(file: Path, tmp_path: Path, browser):
    require_decent(browser, file)
    found = results()
    for run in found["runs"]:
        run["timeline"] = []
    visit = require_decent(browser, drawn(tmp_path, found))
    headings = visit.page.locator("h2").all_inner_texts()
    assert "One step, as it happened" not in headings


def test_every_part_is_there_and_drawn(file: Path, browser):
    page = Visit(browser, file).page
    headings = page.locator("h2").all_inner_texts()
    assert headings == [
        "Loss",
        "Memory of a rank",
        "Traffic of a step",
        "One step, as it happened",
    ]
    # Two charts of curves, and a time line of all but the control.
    assert page.locator("svg[role=img]").count() == 2 + len(KINDS) - 1
    assert page.evaluate("""() => [...document.querySelectorAll("svg[role=img]")].every((svg) => {
        const frame = svg.getBoundingClientRect();
        const drawn = [...svg.querySelectorAll("polyline, rect")];
        return frame.height > 30 && drawn.every((node) => {
            const box = node.getBoundingClientRect();
            return box.left >= frame.left - 1 && box.right <= frame.right + 1 &&
                   box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
        });
    })"""), "a chart that draws beyond its frame is cut off"


def test_what_is_wrong_is_said_in_words(tmp_path: Path, browser):
    found = results(problems=["FAILED: expected equal curves <b>"])
    found["runs"][3]["traffic"]["bytes"] *= 2
    page = Visit(browser, drawn(tmp_path, found)).page
    assert page.locator(".verdict").inner_text() == "1 checks failed"
    assert "FAILED: expected equal curves <b>" in page.locator("header").inner_text()
    row = page.locator("tr", has=page.get_by_role("rowheader", name="ours, bucketed", exact=True))
    assert "differs" in row.all_inner_texts()[2], "its traffic"


def test_both_pages_wear_the_same_style():
    ours = (PACKAGE_ROOT / "rig" / "report" / "house.css").read_bytes()
    assert ours == (REPOSITORY_ROOT / "solution" / "demo" / "house.css").read_bytes()
