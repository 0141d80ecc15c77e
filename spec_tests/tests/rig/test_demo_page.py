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
from spec_tests.tests.rig.demo_results import KINDS, STEPS, results
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


def test_the_curves_lie_on_one_line_and_have_a_point_per_step(file: Path, browser):
    page = Visit(browser, file).page
    curves = page.locator("svg[role=img]").first.locator("polyline")
    points = curves.evaluate_all("nodes => nodes.map(node => node.getAttribute('points'))")
    assert len(points) == len(KINDS)
    assert len(set(points)) == 1, "the results have equal losses"
    assert len(points[0].split()) == STEPS
    named = [curves, page.locator(".legend path")]
    look = "['stroke', 'stroke-dasharray', 'stroke-width'].map(a => n.getAttribute(a)).join()"
    looks, legend = (each.evaluate_all(f"ns => ns.map(n => {look})") for each in named)
    assert len(set(looks)) == len(looks), "each can be told from the others"
    assert looks == legend


def test_differences_of_nothing_are_on_the_floor(file: Path, browser):
    chart = Visit(browser, file).page.locator("svg[role=img]").nth(1)
    points = chart.locator("polyline").evaluate_all("ns => ns.map(n => n.getAttribute('points'))")
    heights = [{float(point.split(",")[1]) for point in curve.split()} for curve in points]
    lowest = max(max(curve) for curve in heights)
    for run, curve in zip(results()["runs"], heights, strict=True):
        assert (curve == {lowest}) == (not any(run["differences"]))


def test_the_time_line_shades_what_happened_at_once(file: Path, browser):
    line = Visit(browser, file).page.get_by_role("img", name="One step of ours, FSDP:")
    boxes = {
        kind: line.locator(f"g.{kind} rect").evaluate_all(
            "ns => ns.map(n => n.getBBox()).map(box => [box.x, box.width])"
        )
        for kind in ("compute", "communication", "overlap")
    }
    assert len(boxes["overlap"]) == len(boxes["communication"]) == 12
    for begin, width in boxes["overlap"]:
        inside = [
            a <= begin + 0.02 and begin + width <= a + w + 0.02 for a, w in boxes["communication"]
        ]
        assert any(inside), f"the overlap at {begin} lies outside of communication"


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
