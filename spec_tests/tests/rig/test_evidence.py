"""The folder of evidence: its page has the counts that each setup must show."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from spec_tests.rig.target import REPOSITORY_ROOT
from spec_tests.tests.rig.browser import Visit

EVIDENCE = REPOSITORY_ROOT / "evidence"
pytestmark = pytest.mark.skipif(not EVIDENCE.is_dir(), reason="no evidence beside the suite")


def told() -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Setup to pass to the counts of both implementations, from the page."""
    found = {}
    for text in (EVIDENCE / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = re.findall(r"^\| (\w+ \d) \|(.*)\|$", text, flags=re.MULTILINE)
        drawing = re.search(r"\((.*)\.svg\)", text)
        assert drawing is not None
        numbers = {name: [int(cell) for cell in cells.split("|")] for name, cells in rows}
        found[drawing[1]] = {name: [(a, b), (c, d)] for name, (a, b, c, d) in numbers.items()}
    return found


def test_each_bonus_is_seen_in_ours_as_in_pytorchs():
    page = told()
    for rows in page.values():
        assert all(ours == theirs for ours, theirs in rows.values())
    shown = {setup: [ours for ours, _ in rows.values()] for setup, rows in page.items()}
    assert shown["every-pass"] == [(5, 0), (4, 5), (5, 0), (4, 5)]
    assert shown["no-reshard-after-forward"] == [(5, 0), (0, 5), (5, 0), (0, 5)]
    assert shown["no-reshard-after-backward"] == [(5, 0), (4, 5), (0, 0), (4, 5)]
    assert shown["reduce-last"] == [(5, 0), (4, 0), (5, 0), (4, 5)]


CALLS = {
    "solution": ("comm.all_gather_rows", "comm.reduce_scatter_sum"),
    "torch": ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"),
}


@pytest.mark.parametrize("impl", CALLS)
def test_the_counts_of_the_page_are_those_of_the_traces(impl: str):
    for setup, rows in told().items():
        text = gzip.decompress((EVIDENCE / f"{setup}-{impl}" / "rank0_trace.json.gz").read_bytes())
        names = [event["name"] for event in json.loads(text)["traceEvents"]]
        pairs = [row[list(CALLS).index(impl)] for row in rows.values()]
        assert [names.count(call) for call in CALLS[impl]] == [
            sum(numbers) for numbers in zip(*pairs, strict=True)
        ]


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
