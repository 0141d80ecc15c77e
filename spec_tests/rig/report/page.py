"""index.html: a report that a person reads in a browser, in one file that needs no network.

The page is written whole, so that it prints and works without its script. It opens with a card for
each cause: what to mend first, the line of code, pictures of the finding (`pictures`) and the story
of the near-miss that it is like. Then clause by implementation, grouped by level and chapter, what
fails first, and under each clause its messages, their likely cause, the stories of the bugs that it
catches, its source and the line to run it again. What is not offered is one folded line. The
script adds filters and folds away what holds and the details. Template, styles and script lie
beside this file; this file decides what is red.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, SILENT, Event, Outcome
from spec_tests.rig.report import pictures
from spec_tests.rig.report.data import Report, as_report
from spec_tests.rig.report.diagnosis import families
from spec_tests.rig.report.points import got
from spec_tests.rig.report.templates import of_pages, unindented
from spec_tests.rig.report.text import WORDS, clip

LEVEL_TITLES = {
    "course": "what the exercises ask",
    "correct": "what the name promises",
    "production": "what PyTorch offers beyond",
}
_LACKS = re.compile(r"^not offered: (.+)$", re.MULTILINE)
_MAX_MESSAGE_LINES = 30
_MAX_STORIES = 2
_MAX_CASES = 6
_MAX_CARDS = 8  # beyond them a cause is a line
_OPEN_CARDS = 1  # one fills half a screen
_SAID = ("[", "likely: ", "why: ")
_FAILING = REFUTED | BROKEN | {Outcome.EXPECTED_FAILURE}


def render_page(events: Sequence[Event]) -> str:
    """Return the whole page as text."""
    report = as_report(events)
    found = report["implementations"]
    names = [one["name"] for one in found]
    cards = {
        one["name"]: _cards(one, report["clauses"], f"cause-{number}")
        for number, one in enumerate(found, start=1)
    }
    absent = _absent(report["clauses"])
    left_out = {id for of in absent.values() for id in of["clauses"]}
    rows = [_row(row, cards) for row in report["clauses"] if row["id"] not in left_out]
    present = {cell["outcome"] for row in rows for cell in row["cells"].values()}

    def ratio_kind(one: Mapping[str, Any], level: str) -> str:
        counted = one["levels"][level]
        if counted["passed"] == counted["judged"]:
            return "good"
        return "bad" if _is_refuted(report, one, level) else "warn"

    template = of_pages().get_template("page.html.jinja")
    return template.render(
        report=report,
        names=names,
        title=f"Conformance of {', '.join(names) or 'nothing'}",
        styles=unindented("house.css") + unindented("page.css"),
        script=unindented("page.js"),
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
        max_cases=_MAX_CASES,
        absent=absent,
        cards=cards,
        max_cards=_MAX_CARDS,
        open_cards=_OPEN_CARDS,
        ratio_kind=ratio_kind,
        kind_of=_kind,
        got=got,
        points_kind=_points_kind,
    )


def _cards(
    one: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], prefix: str
) -> list[dict[str, Any]]:
    """Return each cause of an implementation with what its card shows."""
    by_id = {row["id"]: row for row in rows}
    stories = {story["impostor"]: story for row in rows for story in row["stories"]}
    cards: list[dict[str, Any]] = []
    for cause in one["causes"]:
        first = by_id[cause["clauses"][0]]
        shown = _cell(first["cells"][one["name"]], cause["case"])["shown"]
        evidence = shown["evidence"]
        levels = Counter(by_id[id]["level"] for id in cause["clauses"])
        cards.append(
            {
                **cause,
                "id": f"{prefix}-{len(cards) + 1}",
                "levels": {level: levels[level] for level in LEVELS if levels[level]},
                "shown": shown,
                # The command stands above it.
                "finding": shown["clipped"].replace(f"\nagain: {shown['rerun']}\n", "\n"),
                "source": _dedented(evidence.get("source")),
                "pictures": [draw(evidence[of]) for of, draw in _PICTURES if of in evidence],
                "story": stories.get(cause["like"].removeprefix("impostor:")),
                "kind": "; or ".join(
                    families().says[each] for each in cause["family"].split(" or ") if each
                ),
            }
        )
    return cards


def _dedented(source: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if source is None:
        return None
    return {**source, "lines": textwrap.dedent("\n".join(source["lines"])).split("\n")}


_PICTURES = (
    ("wrong", pictures.heat_maps),
    ("lanes", pictures.lanes),
    ("memory", pictures.memory),
)


def _absent(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return chapter to the clauses that nobody offers anything for, and what is missing.

    Where a whole chapter is not offered, neither are its clauses for another machine.
    """
    mute = {Outcome.NOT_OFFERED, Outcome.NOT_HERE}
    found: dict[str, dict[str, Any]] = {}
    lacking = {row["chapter"] for row in rows if _outcomes(row) == {Outcome.NOT_OFFERED}}
    lacking -= {row["chapter"] for row in rows if not _outcomes(row) <= mute}
    for row in rows:
        if _outcomes(row) == {Outcome.NOT_OFFERED} or row["chapter"] in lacking:
            of = found.setdefault(row["chapter"], {"clauses": set(), "missing": {}})
            of["clauses"].add(row["id"])
            for case in (case for cell in row["cells"].values() for case in cell["cases"]):
                lacks = _LACKS.search(case["message"])
                of["missing"] |= dict.fromkeys(lacks[1].split(", ") if lacks else [])
    return found


def _outcomes(row: Mapping[str, Any]) -> set[Outcome]:
    return {Outcome(cell["outcome"]) for cell in row["cells"].values()}


def _row(row: Mapping[str, Any], cards: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return a clause with what the template decides by."""
    cells = {name: _cell(cell) for name, cell in row["cells"].items()}
    for name, cell in cells.items():
        at = next((card for card in cards[name] if row["id"] in card["clauses"]), None)
        is_first = at is None or at["clauses"][0] == row["id"]
        cell["card"] = at["id"] if at and at in cards[name][:_MAX_CARDS] and is_first else ""
        cell["tells"] = is_first and not (at and at["story"])
    found = {Outcome(cell["outcome"]) for cell in cells.values()}
    needs_attention = bool(found & (REFUTED | BROKEN))
    return {
        **row,
        "cells": cells,
        "outcomes": [*sorted(found), *(["attention"] if needs_attention else [])],
        "needs_attention": needs_attention,
        # Where several share a cause, the stories are told of the first, or its card tells one.
        "tells": any(Outcome(c["outcome"]) in _FAILING and c["tells"] for c in cells.values()),
    }


def _cell(cell: Mapping[str, Any], named: str = "") -> dict[str, Any]:
    """Return a cell with a case in full, the first decisive one unless one is named."""
    decisive = [case for case in cell["cases"] if case["outcome"] == cell["outcome"]]
    first = next((case for case in cell["cases"] if case["case"] == named), decisive[0])
    others = [case for case in decisive if case is not first]
    message = clip(first["message"].rstrip(), _MAX_MESSAGE_LINES)
    # What a row says of its clause anyway is left out of its message.
    brief = [line for line in message.splitlines() if not line.startswith(_SAID)]
    shown = {**first, "clipped": message, "brief": "\n".join(brief)}
    return {**cell, "shown": shown, "others": [case["case"] for case in others]}


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, str], list[Any]]]:
    """Return the rows by level and chapter, what fails first, in groups as in each of them.

    Then levels from the lowest, chapters as they come.
    """
    order = {row["chapter"]: number for number, row in reversed(list(enumerate(rows)))}
    failing = {(row["level"], row["chapter"]) for row in rows if row["needs_attention"]}

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        own = row["level"], row["chapter"]
        return own not in failing, LEVELS.index(row["level"]), order[row["chapter"]]

    ordered = sorted(rows, key=lambda row: (*place(row), not row["needs_attention"]))
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
