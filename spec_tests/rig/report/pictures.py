"""Pictures of a finding, as inline SVG or a table: what is seen sooner than read.

    heat_maps   which elements of a tensor are wrong: a small grid for each rank
    lanes       who waits for whom: the last collectives of each rank, a column each, by number
    memory      bytes over time, and how many were allowed at the moment that is judged

Each takes the part of a case's `evidence` of its name, as `data` documents it, and returns a figure
with its caption. This file says what is where, `pictures.html.jinja` draws it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from markupsafe import Markup

from spec_tests.rig.report.templates import of_pages

CELL = 10
_WORDS = 18
_WIDE, _HIGH = 660, 150
_MOST_LABELS = 12


@cache
def _drawing() -> Any:
    return of_pages().get_template("pictures.html.jinja").module


# ----------------------------------------------------------------------------------- heat maps


def heat_maps(wrong: Mapping[str, Any]) -> Markup:
    """Return a grid of elements for each rank, next to each other as far as there is room."""
    grids = []
    for rank, (cells, rows, columns) in wrong["ranks"].items():
        count = len(cells) - cells.count("-")
        bad = cells.count("1") + cells.count("x")
        # What is right lies below all: a run for each row, not one between any two wrong cells.
        layers = (("right", "01x"), ("wrong", "1"), ("odd", "x"))
        runs = {name: _runs(cells, columns, signs) for name, signs in layers}
        words = f"rank {rank}: {bad}/{count}", f"rank {rank}: {bad} of {count} cells wrong"
        grids.append((*words, max(columns * CELL, 100), 20 + rows * CELL, runs))
    signs = {cell for cells, _, _ in wrong["ranks"].values() for cell in cells}
    said = [" by ".join(map(str, wrong["shape"]))]
    keys = {"0": "plain: right", "1": "crossed: wrong", "x": "ringed: not finite"}
    said += [words for sign, words in keys.items() if sign in signs]
    first = next(iter(wrong["ranks"].values()))
    if len(first[0]) < math.prod(wrong["shape"]):
        said.append("a cell is the worst of several elements")
    title = f"Which elements of {wrong['name']} are wrong"
    return _drawing().heat_maps(title, "; ".join(said), grids)


def _runs(cells: str, columns: int, signs: str) -> str:
    """The path through every run of some signs, as thick as a cell; a run ends with its row."""
    return "".join(
        f"M{run.start() * CELL} {at // columns * CELL + CELL // 2}h{len(run[0]) * CELL}"
        for at in range(0, len(cells), columns)
        for run in re.finditer(f"[{signs}]+", cells[at : at + columns])
    )


# ---------------------------------------------------------------------------------- swim lanes

_Key = tuple[str, int]  # a group, and the number of an operation on it


def lanes(ranks: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a column for each rank: its last collectives, side by side where they are one.

    A table, so that every rank's are seen on a narrow screen: its cells wrap.
    """
    keys = _numbers(ranks)
    several = len({group for group, _ in keys}) > 1
    parted = _parted(ranks)
    heads = [
        (lane["rank"], *(("waits", "is blocked") if lane["waits"] else ("state", lane["state"])))
        for lane in ranks
    ]
    rows = [
        (
            f"#{number}{f' of {_short(group)}' if several else ''}",
            [_call(lane, (group, number), parted) for lane in ranks],
        )
        for group, number in keys
    ]
    waits = any(lane["waits"] for lane in ranks)
    said = ["the last collectives by number, oldest first"]
    said += ["framed: the last that a blocked rank issued"] * waits
    said += ["≠: the ranks issued different ones"] * bool(parted)
    title = "Who waits for whom" if waits else "What was issued last"
    return _drawing().lanes(title, "; ".join(said), heads, rows)


def _call(lane: Mapping[str, Any], key: _Key, parted: set[_Key]) -> tuple[str, str, str]:
    """Return kind and words of what a rank issued under a number, and the whole if it is cut."""
    own = {(group, number): what for what, number, group in lane["calls"]}
    what = own.get(key)
    if what is None:
        known = [number for group, number in own if group == key[0]]
        words = "not issued" if known and key[1] > max(known) else "…" if own else "none known"
        return "absent", words, ""
    kind = "odd" if key in parted else "call"
    if lane["waits"] and [*own][-1] == key:
        kind += " waits"
    short = _short(what)
    return kind, "≠ " * (key in parted) + short, what if short.endswith("…") else ""


def _short(what: str) -> str:
    """`all_reduce [[5, 6]]` as `all_reduce 5×6`, `all_reduce (sizes (30,), ...)` of simulated ranks
    as `all_reduce 30`, clipped.
    """
    operation, _, shapes = what.partition(" ")
    if sizes := re.match(r"\(sizes \(([^)]*)", shapes):
        shapes = sizes[1].strip(",").replace(", ", "+")
    shapes = shapes.replace("], [", "+").replace(", ", "×").strip("[]")
    words = f"{operation} {shapes}".strip()
    return words if len(words) <= _WORDS else f"{words[: _WORDS - 1]}…"


def _numbers(ranks: Sequence[Mapping[str, Any]]) -> list[_Key]:
    """The operations of all ranks in one order that agrees with the order on each."""
    rows: list[_Key] = []
    for lane in ranks:
        at = 0
        for _, number, group in lane["calls"]:
            if (group, number) in rows:
                at = rows.index((group, number)) + 1
                continue
            while at < len(rows) and rows[at][0] == group and rows[at][1] < number:
                at += 1
            rows.insert(at, (group, number))
            at += 1
    return rows


def _parted(ranks: Sequence[Mapping[str, Any]]) -> set[_Key]:
    """Operations of which two ranks issued different ones; letters have numbers of their own."""
    seen: dict[_Key, set[str]] = {}
    for lane in ranks:
        for what, number, group in lane["calls"]:
            if not what.startswith(("send", "recv")):
                seen.setdefault((group, number), set()).add(what)
    return {key for key, different in seen.items() if len(different) > 1}


# -------------------------------------------------------------------------------------- memory


def memory(found: Mapping[str, Any]) -> Markup:
    """Return bytes over time as a step line, or a bar for one number, against what is allowed."""
    points, judged, allowed = found["points"], found["judged"], found["allowed"]
    moment, number = points[judged]
    top = max([allowed, *(size for _, size in points)]) or 1
    many = len(points) > 1
    wide, column = (_WIDE, _WIDE / len(points)) if many else (260, 120.0)

    def y(size: int) -> float:
        return round(24 + (_HIGH - 24) * (1 - size / top), 1)

    left, right = judged * column, (judged + 1) * column
    line = "".join(
        f"{'L' if at else 'M'}{at * column:.4g} {y(size)}H{(at + 1) * column:.4g}"
        for at, (_, size) in enumerate(points)
    )
    x, anchor = (left - 12, "end") if right > wide * 0.7 else (right + 12, "start")
    words = []
    for size, name in ((allowed, "allowed"), (number, "measured")):
        shift = 12 if size == allowed and y(allowed) - y(number) < 14 else 0
        words.append((name, y(size) + 4 + shift, f"{name} {_bytes(size)}"))
    said = f"{moment}: {number} bytes, allowed {allowed}"
    few = 1 < len(points) <= _MOST_LABELS
    every = [f"{words} {size}" for words, size in points] if few else []
    return _drawing().memory(
        title=f"Bytes that rank {found['rank']} held" + " over time" * many,
        said=said,
        whole="; ".join([said, *every]),
        size=(wide, _HIGH + 32 * many),
        axis=f"M0 {_HIGH}H{wide}",
        over=f"M{left:.4g} {_HIGH}V{y(number)}H{right:.4g}V{_HIGH}z",
        line=line,
        # A limit holds at one moment: at others another amount may be right.
        limit=f"M{left - 8:.4g} {y(allowed)}H{right + 8:.4g}",
        words=(f"{x:.4g}", anchor, words),
        moments=_labels(points, judged, column) if many else [],
    )


def _labels(
    points: Sequence[Sequence[Any]], judged: int, column: float
) -> list[tuple[bool, str, int, str]]:
    """Return where to write which moments: all, or of many the first, the judged and the last."""
    chosen = range(len(points))
    at_ends = sorted({0, judged, len(points) - 1})
    return [
        (at == judged, f"{(at + 0.5) * column:.4g}", 165 + 13 * row, word)
        for at in (chosen if len(points) <= _MOST_LABELS else at_ends)
        for row, word in enumerate(textwrap.wrap(str(points[at][0]), 8)[:2])
    ]


def _bytes(size: int) -> str:
    for unit, of in (("MB", 1_000_000), ("kB", 1_000)):
        if size >= 10 * of:
            return f"{size / of:,.0f} {unit}"
    return f"{size:,} bytes"
