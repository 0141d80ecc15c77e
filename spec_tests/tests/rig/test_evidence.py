"""The folder of evidence: its page has the counts of its traces, counted here by other means."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from spec_tests.rig.target import REPOSITORY_ROOT
from spec_tests.tests.rig.browser import Visit
from spec_tests.tests.rig.helpers import python

EVIDENCE = REPOSITORY_ROOT / "evidence"
pytestmark = pytest.mark.skipif(not EVIDENCE.is_dir(), reason="no evidence beside the suite")

GATHER = re.compile(r"comm\.all_gather_rows|c10d::_allgather_base_")
REDUCE = re.compile(r"comm\.reduce_scatter_sum|c10d::_reduce_scatter_base_")
PASSES = ("forward 1", "backward 1", "forward 2", "backward 2")


def counted(path: Path) -> dict[str, tuple[int, int]]:
    """Gathers and reductions of each pass, from the trace's text in the order of its time.

    A forward looks up two embeddings; the engine's operators are a backward's.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found: Counter[tuple[int, str]] = Counter()
    forwards = lookups = backwards = 0
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        name = event["name"]
        if name == "aten::embedding":
            lookups += 1
            forwards = (lookups + 1) // 2
        elif name.startswith("autograd::engine::evaluate_function"):
            backwards, ends = forwards, event["ts"] + event["dur"]
        elif GATHER.fullmatch(name):
            is_inside = 0 < backwards == forwards and event["ts"] < ends
            # A root gathers before its first lookup, which is after the backward before.
            found[(backwards if is_inside else backwards + 1), "b" if is_inside else "f"] += 1
        elif REDUCE.fullmatch(name):
            found[backwards, "r"] += 1
    return {
        each: (found[number, each[0]], found[number, "r"] if each[0] == "b" else 0)
        for each, number in zip(PASSES, (1, 1, 2, 2), strict=True)
    }


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


def test_the_counts_on_the_page_are_those_of_the_traces():
    page = told()
    assert len(page) == 4
    for setup, rows in page.items():
        assert [*rows] == [*PASSES]
        for column, impl in enumerate(("solution", "torch")):
            expected = counted(EVIDENCE / f"{setup}-{impl}" / "rank0_trace.json.gz")
            assert {name: row[column] for name, row in rows.items()} == expected, (setup, impl)


def test_each_bonus_is_seen_in_ours_as_in_pytorchs():
    page = told()
    for rows in page.values():
        assert all(ours == theirs for ours, theirs in rows.values())
    shown = {setup: [ours for ours, _ in rows.values()] for setup, rows in page.items()}
    assert shown["every-pass"] == [(5, 0), (4, 5), (5, 0), (4, 5)]
    assert shown["no-reshard-after-forward"] == [(5, 0), (0, 5), (5, 0), (0, 5)]
    assert shown["no-reshard-after-backward"] == [(5, 0), (4, 5), (0, 0), (4, 5)]
    assert shown["reduce-last"] == [(5, 0), (4, 0), (5, 0), (4, 5)]


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_drawings_are_of_both_schemes_and_nothing_overlaps(scheme: str, browser):
    for path in sorted(EVIDENCE.glob("*.svg")):
        page = Visit(
            browser, path, color_scheme=scheme, viewport={"width": 420, "height": 600}
        ).page
        ink = page.evaluate("getComputedStyle(document.querySelector('text')).fill")
        assert ink == {"light": "rgb(29, 35, 39)", "dark": "rgb(228, 232, 234)"}[scheme]
        boxes = page.locator("text").evaluate_all(
            "ns => ns.map(n => n.getBoundingClientRect()).map(b => [b.x, b.y, b.width, b.height])"
        )
        assert len(boxes) == 2 * (1 + 4 + 3 + 8)
        for (x, y, width, height), (left, top, wide, high) in combinations(boxes, 2):
            is_beside = x + width <= left or left + wide <= x
            assert is_beside or y + height <= top + 2 or top + high <= y + 2, path
