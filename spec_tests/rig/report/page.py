"""index.html: a report that a person reads in a browser, in one file that needs no network.

The page is written whole, so that it prints and works without its script: clause by implementation,
grouped by level and chapter, and under each clause its messages, their likely cause, the stories of
the bugs that it catches, its source and the line to run it again. The script adds filters and folds
the details away. Template, styles and script lie beside this file; this file decides what is red.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, SILENT, Event, Outcome
from spec_tests.rig.report.data import Report, as_report
from spec_tests.rig.report.points import got
from spec_tests.rig.report.text import WORDS, clip

LEVEL_TITLES = {
    "course": "what the exercises ask",
    "correct": "what the name promises",
    "production": "what PyTorch offers beyond",
}
_FOLDER = Path(__file__).parent
# One line only: a fence, or a back-tick that has no fellow, is left as it is.
_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+)\1(?!`)")
_MAX_MESSAGE_LINES = 60
_MAX_STORIES = 6
_FAILING = REFUTED | BROKEN | {Outcome.EXPECTED_FAILURE}


def render_page(events: Sequence[Event]) -> str:
    """Return the whole page as text."""
    report = as_report(events)
    found = report["implementations"]
    names = [one["name"] for one in found]
    rows = [_row(row) for row in report["clauses"]]
    present = {cell["outcome"] for row in rows for cell in row["cells"].values()}

    def ratio_kind(one: Mapping[str, Any], level: str) -> str:
        counted = one["levels"][level]
        if counted["passed"] == counted["judged"]:
            return "good"
        return "bad" if _is_refuted(report, one, level) else "warn"

    return _template().render(
        report=report,
        names=names,
        title=f"Conformance of {', '.join(names) or 'nothing'}",
        styles="".join((_FOLDER / name).read_text("utf-8") for name in ("house.css", "page.css")),
        script=(_FOLDER / "page.js").read_text("utf-8"),
        verdict_kind={0: "good", 1: "bad"}.get(report["verdict"]["status"], "warn"),
        held_to=list(dict.fromkeys(one["level"] for one in found)),
        levels=LEVELS,
        shown_levels=[level for level in LEVELS if any(level in one["levels"] for one in found)],
        level_titles=LEVEL_TITLES,
        chapters=list(dict.fromkeys(row["chapter"] for row in rows)),
        outcomes=[outcome for outcome in Outcome if outcome in present],
        words=WORDS,
        silent=SILENT,
        groups=_grouped(rows),
        max_stories=_MAX_STORIES,
        ratio_kind=ratio_kind,
        kind_of=_kind,
        got=got,
        points_kind=_points_kind,
    )


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"prose": prose, "linked": linked}
    return environment.get_template("page.html.jinja")


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a clause with what the template decides by."""
    cells = {name: _cell(cell) for name, cell in row["cells"].items()}
    found = {Outcome(cell["outcome"]) for cell in cells.values()}
    needs_attention = bool(found & (REFUTED | BROKEN))
    return {
        **row,
        "cells": cells,
        "outcomes": [*sorted(found), *(["attention"] if needs_attention else [])],
        "needs_attention": needs_attention,
        "has_failed": bool(found & _FAILING),
    }


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell with its first decisive case in full, and the names of the others."""
    first, *others = [case for case in cell["cases"] if case["outcome"] == cell["outcome"]]
    shown = {**first, "clipped": clip(first["message"].rstrip(), _MAX_MESSAGE_LINES)}
    return {**cell, "shown": shown, "others": [case["case"] for case in others]}


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, str], list[Any]]]:
    """Return the rows by level and chapter: levels from the lowest, chapters as they come."""
    order = {row["chapter"]: number for number, row in reversed(list(enumerate(rows)))}
    ordered = sorted(rows, key=lambda r: (LEVELS.index(r["level"]), order[r["chapter"]]))
    by_place = groupby(ordered, key=lambda row: (row["level"], row["chapter"]))
    return [(place, list(of_place)) for place, of_place in by_place]


def _is_refuted(report: Report, one: Mapping[str, Any], level: str) -> bool:
    """Return whether a MUST clause of the level does not hold for an implementation."""
    return any(
        Outcome(row["cells"][one["name"]]["outcome"]) in REFUTED
        for row in report["clauses"]
        if (row["strength"], row["level"]) == ("MUST", level) and one["name"] in row["cells"]
    )


def _kind(word: str) -> str:
    outcome = Outcome(word)
    if outcome is Outcome.PASSED:
        return "good"
    if outcome in SILENT:
        return "mute"
    return "bad" if outcome in REFUTED else "warn"


def _points_kind(item: Mapping[str, Any]) -> str:
    if item["by_hand"] or item["not_judged"]:
        return "mute"
    return "good" if item["points"] == item["of"] else "bad"


def prose(text: str) -> Markup:
    """Return the text as HTML, escaped, with what is in back-ticks as code.

    >>> print(prose("`x < 1` and a lone `"))
    <code>x &lt; 1</code> and a lone `
    """
    return Markup(_marked(text, escape))


def linked(text: str) -> Markup:
    """Return the same with bare addresses as links; nothing is fetched unless one is followed.

    >>> print(linked("see https://example.org/a"))
    see <a href='https://example.org/a' rel='noreferrer'>https://example.org/a</a>
    """
    return Markup(_marked(text, lambda plain: " ".join(map(_link, plain.split(" ")))))


def _marked(text: str, plain: Callable[[str], str]) -> str:
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [plain(text[end : found.start()]), f"<code>{escape(found[2])}</code>"]
        end = found.end()
    return "".join([*parts, plain(text[end:])])


def _link(word: str) -> str:
    if not word.startswith("https://"):
        return escape(word)
    address = word.rstrip(".,;)")
    rest = word.removeprefix(address)
    return f"<a href='{escape(address)}' rel='noreferrer'>{escape(address)}</a>{escape(rest)}"
