"""Pictures of a finding, as inline SVG or a table: what is seen sooner than read.

    heat_maps   which elements of a tensor are wrong: a small grid for each rank
    lanes       who waits for whom: the last collectives of each rank, a column each, by number
    memory      bytes over time, and how many were allowed at the moment that is judged

Each takes the part of a case's `evidence` of its name, as `data` documents it, and returns a figure
with its caption. Colours are the page's own variables, so that they follow light, dark and paper,
and nothing is said by colour alone: what is wrong is crossed, thick or written. `PATTERNS` goes
into a page once.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

CELL = 10
_WORDS = 18
_WIDE, _HIGH = 660, 150
_MOST_LABELS = 12

PATTERNS = Markup(
    '<svg class="patterns" aria-hidden="true" width="0" height="0"><defs>'
    '<pattern id="right" width="10" height="10" patternUnits="userSpaceOnUse">'
    '<rect class="right" x=".5" y=".5" width="9" height="9"/></pattern>'
    '<pattern id="wrong" width="10" height="10" patternUnits="userSpaceOnUse">'
    '<rect class="wrong" x=".5" y=".5" width="9" height="9"/>'
    '<path class="cross" d="M3 3l4 4M7 3l-4 4"/></pattern>'
    '<pattern id="odd" width="10" height="10" patternUnits="userSpaceOnUse">'
    '<rect class="odd" x=".5" y=".5" width="9" height="9"/>'
    '<circle class="ring" cx="5" cy="5" r="2.2"/></pattern></defs></svg>'
)
"""How cells of a grid are filled."""

# ----------------------------------------------------------------------------------- heat maps


def heat_maps(wrong: Mapping[str, Any]) -> Markup:
    """Return a grid of elements for each rank, next to each other as far as there is room."""
    title, parts = f"Which elements of {wrong['name']} are wrong", []
    for rank, (cells, rows, columns) in wrong["ranks"].items():
        count = len(cells) - cells.count("-")
        bad = cells.count("1") + cells.count("x")
        # What is right lies below all: a run for each row, not one between any two wrong cells.
        layers = (("right", "01x"), ("wrong", "1"), ("odd", "x"))
        grid = "".join(
            f'<path stroke="url(#{name})" d="{runs}"/>'
            for name, signs in layers
            if (runs := _runs(cells, columns, signs))
        )
        inside = (
            f'<text x="0" y="12">rank {rank}: {bad}/{count}</text>'
            f'<g class="grid" transform="translate(0 20)">{grid}</g>'
        )
        said = f"rank {rank}: {bad} of {count} cells wrong"
        size = (max(columns * CELL, 100), 20 + rows * CELL)
        parts.append(_svg(title, said, inside, size))
    signs = {cell for cells, _, _ in wrong["ranks"].values() for cell in cells}
    size_of = [" by ".join(map(str, wrong["shape"]))]
    keys = {"0": "plain: right", "1": "crossed: wrong", "x": "ringed: not finite"}
    size_of += [words for sign, words in keys.items() if sign in signs]
    first = next(iter(wrong["ranks"].values()))
    if len(first[0]) < math.prod(wrong["shape"]):
        size_of.append("a cell is the worst of several elements")
    grids = f'<div class="grids">{"".join(parts)}</div>'
    return Markup(f"<figure>{grids}{_caption(title, '; '.join(size_of))}</figure>")


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
    rows = _numbers(ranks)
    several = len({group for group, _ in rows}) > 1
    parted = _parted(ranks)
    heads = "".join(
        f'<th scope="col">rank {lane["rank"]} '
        f'<span class="{"waits" if lane["waits"] else "state"}">{escape(_state(lane))}</span></th>'
        for lane in ranks
    )
    body = "".join(
        f'<tr><th scope="row">#{number}{f" of {escape(_short(group))}" if several else ""}</th>'
        + "".join(_call(lane, (group, number), parted) for lane in ranks)
        + "</tr>"
        for group, number in rows
    )
    keys = ["the last collectives by number, oldest first"]
    keys += ["framed: the last that a blocked rank issued"] * any(lane["waits"] for lane in ranks)
    keys += ["≠: the ranks issued different ones"] * bool(parted)
    title = "Who waits for whom" if any(lane["waits"] for lane in ranks) else "What was issued last"
    head = f'<thead><tr><th scope="col">#</th>{heads}</tr></thead>'
    return Markup(
        f'<figure><table class="lanes">{head}<tbody>{body}</tbody></table>'
        f"{_caption(title, '; '.join(keys))}</figure>"
    )


def _call(lane: Mapping[str, Any], key: _Key, parted: set[_Key]) -> str:
    """A cell: what a rank issued under a number."""
    own = {(group, number): what for what, number, group in lane["calls"]}
    what = own.get(key)
    if what is None:
        known = [number for group, number in own if group == key[0]]
        words = "not issued" if known and key[1] > max(known) else "…" if own else "none known"
        return f'<td class="absent">{words}</td>'
    kind = "odd" if key in parted else "call"
    if lane["waits"] and [*own][-1] == key:
        kind += " waits"
    short = _short(what)
    said = f' title="{escape(what)}"' if short.endswith("…") else ""
    return f'<td class="{kind}"{said}>{"≠ " * (key in parted)}{escape(short)}</td>'


def _state(lane: Mapping[str, Any]) -> str:
    return "is blocked" if lane["waits"] else str(lane["state"])


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
    high, top = _HIGH, max([allowed, *(size for _, size in points)]) or 1
    wide, column = (260, 120.0) if len(points) == 1 else (_WIDE, _WIDE / len(points))

    def y(size: int) -> float:
        return round(24 + (high - 24) * (1 - size / top), 1)

    number = points[judged][1]
    parts = [f'<path class="axis" d="M0 {high}H{wide}"/>']
    left, right = judged * column, (judged + 1) * column
    line = "".join(
        f"{'L' if at else 'M'}{at * column:.4g} {y(size)}H{(at + 1) * column:.4g}"
        for at, (_, size) in enumerate(points)
    )
    over = f"M{left:.4g} {high}V{y(number)}H{right:.4g}V{high}z"
    parts.append(f'<path class="over" d="{over}"/><path class="line" d="{line}"/>')
    # A limit holds at one moment: at others another amount may be right.
    parts.append(f'<path class="limit" d="M{left - 8:.4g} {y(allowed)}H{right + 8:.4g}"/>')
    is_late = right > wide * 0.7
    x, anchor = (left - 12, "end") if is_late else (right + 12, "start")
    for size, words in ((allowed, "allowed"), (number, "measured")):
        shift = 12 if size == allowed and y(allowed) - y(number) < 14 else 0
        parts.append(
            f'<text class="{words}" x="{x:.4g}" y="{y(size) + 4 + shift}" '
            f'text-anchor="{anchor}">{words} {_bytes(size)}</text>'
        )
    parts += _labels(points, judged, column) if len(points) > 1 else []
    moment = points[judged][0]
    title = f"Bytes that rank {found['rank']} held" + (" over time" if len(points) > 1 else "")
    said = f"{moment}: {number} bytes, allowed {allowed}"
    low = high + 32 * (len(points) > 1)
    few = 1 < len(points) <= _MOST_LABELS
    every = "; ".join(f"{words} {size}" for words, size in points) if few else ""
    drawn = _svg(title, "; ".join(filter(None, [said, every])), "".join(parts), (wide, low))
    return Markup(f"<figure>{drawn}{_caption(title, said)}</figure>")


def _labels(points: Sequence[Sequence[Any]], judged: int, column: float) -> list[str]:
    """Every moment, or where they are many the first, the judged and the last."""
    shown = range(len(points))
    chosen = set(shown) if len(points) <= _MOST_LABELS else {0, judged, len(points) - 1}
    parts = ['<g class="moments">']
    for at in sorted(chosen):
        kind = ' class="judged"' if at == judged else ""
        parts += [
            f'<text{kind} x="{(at + 0.5) * column:.4g}" y="{165 + 13 * row}">{escape(word)}</text>'
            for row, word in enumerate(textwrap.wrap(str(points[at][0]), 8)[:2])
        ]
    return [*parts, "</g>"]


def _bytes(size: int) -> str:
    for unit, of in (("MB", 1_000_000), ("kB", 1_000)):
        if size >= 10 * of:
            return f"{size / of:,.0f} {unit}"
    return f"{size:,} bytes"


# ------------------------------------------------------------------------------------------ all


def _svg(title: str, said: str, inside: str, size: tuple[int, int]) -> str:
    width, height = size[0] + 2, size[1] + 2
    return (
        f'<svg role="img" width="{width}" height="{height}" '
        f'viewBox="-1 -1 {width} {height}"><title>{escape(title)}</title>'
        f"<desc>{escape(said)}</desc>{inside}</svg>"
    )


def _caption(title: str, words: str) -> str:
    return f"<figcaption><strong>{escape(title)}</strong> {escape(words)}</figcaption>"
