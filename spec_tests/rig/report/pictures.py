"""Pictures of a finding, as inline SVG: what is seen sooner than read.

    heat_maps   which elements of a tensor are wrong: a small grid for each rank
    lanes       who waits for whom: the last collectives of each rank, a lane each, by number
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
_LETTER = 6.7  # width of a letter in a lane
_LANE, _BOX, _LEFT = 40, 26, 62
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
    """Return a grid of elements for each rank, in a row."""
    parts, said, x, height = [], [], 0, 0
    for rank, (cells, rows, columns) in wrong["ranks"].items():
        count = len(cells) - cells.count("-")
        bad = cells.count("1") + cells.count("x")
        said.append(f"rank {rank}: {bad} of {count} cells wrong")
        # What is right lies below all: a run for each row, not one between any two wrong cells.
        layers = (("right", "01x"), ("wrong", "1"), ("odd", "x"))
        grid = "".join(
            f'<path stroke="url(#{name})" d="{runs}"/>'
            for name, signs in layers
            if (runs := _runs(cells, columns, signs))
        )
        parts.append(
            f'<text x="{x}" y="12">rank {rank}: {bad}/{count}</text>'
            f'<g class="grid" transform="translate({x} 20)">{grid}</g>'
        )
        x += max(columns * CELL, 100) + 24
        height = max(height, 20 + rows * CELL)
    signs = {cell for cells, _, _ in wrong["ranks"].values() for cell in cells}
    size = [" by ".join(map(str, wrong["shape"]))]
    keys = {"0": "plain: right", "1": "crossed: wrong", "x": "ringed: not finite"}
    size += [words for sign, words in keys.items() if sign in signs]
    first = next(iter(wrong["ranks"].values()))
    if len(first[0]) < math.prod(wrong["shape"]):
        size.append("a cell is the worst of several elements")
    title = f"Which elements of {wrong['name']} are wrong"
    return _figure(title, "; ".join(said), "".join(parts), (x, height), "; ".join(size))


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
    """Return a lane for each rank: its last collectives, under each other where they are one."""
    columns = _columns(ranks)
    several = len({group for group, _ in columns}) > 1
    words = [_short(what) for lane in ranks for what, _, _ in lane["calls"]]
    parted = _parted(ranks)
    wide = max(76, int((max(map(len, words), default=0) + 2 * bool(parted)) * _LETTER) + 14)
    parts = [
        f'<text class="soft" x="{_LEFT + at * (wide + 6)}" y="12">#{number}'
        + (f" of {escape(_short(group))}" if several else "")
        + "</text>"
        for at, (group, number) in enumerate(columns)
    ]
    for row, lane in enumerate(ranks):
        parts.append(_lane(lane, row, columns, parted, wide))
    ends = max((len(lane["state"]) + 10 for lane in ranks), default=0)
    size = (_LEFT + len(columns) * (wide + 6) + int(ends * _LETTER), 20 + len(ranks) * _LANE)
    keys = ["each rank's last collectives by number, oldest first"]
    keys += ["thick: the last that a blocked rank issued"] * any(lane["waits"] for lane in ranks)
    keys += ["≠: the ranks issued different ones"] * bool(parted)
    said = "; ".join(
        f"rank {lane['rank']} {_state(lane)}"
        + (", last {} #{}".format(*lane["calls"][-1]) if lane["calls"] else "")
        for lane in ranks
    )
    title = "Who waits for whom" if any(lane["waits"] for lane in ranks) else "What was issued last"
    return _figure(title, said, "".join(parts), size, "; ".join(keys))


def _lane(
    lane: Mapping[str, Any],
    row: int,
    columns: Sequence[_Key],
    parted: set[_Key],
    wide: int,
) -> str:
    y = 20 + row * _LANE
    issued = {(group, number): what for what, number, group in lane["calls"]}
    last = {group: number for _, number, group in lane["calls"]}
    parts = [f'<text x="0" y="{y + 17}">rank {lane["rank"]}</text>']
    for at, key in enumerate(columns):
        x = _LEFT + at * (wide + 6)
        what = issued.get(key)
        if what is None:
            if key[1] > last.get(key[0], key[1]):
                parts.append(_box(x, y, wide, "absent", "not issued", ""))
            continue
        kind = "odd" if key in parted else "call"
        if lane["waits"] and lane["calls"][-1] == [what, key[1], key[0]]:
            kind += " waits"
        parts.append(_box(x, y, wide, kind, "≠ " * (key in parted) + _short(what), what))
    x = _LEFT + len(columns) * (wide + 6) + 4
    state = "waits" if lane["waits"] else "state"
    parts.append(f'<text class="{state}" x="{x}" y="{y + 17}">{escape(_state(lane))}</text>')
    return "".join(parts)


def _box(x: int, y: int, wide: int, kind: str, words: str, title: str) -> str:
    said = f"<title>{escape(title)}</title>" if words.endswith("…") else ""
    return (
        f'<g class="{kind}">{said}<rect x="{x}" y="{y}" width="{wide}" height="{_BOX}" rx="4"/>'
        f'<text x="{x + 6}" y="{y + 17}">{escape(words)}</text></g>'
    )


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


def _columns(ranks: Sequence[Mapping[str, Any]]) -> list[_Key]:
    """The operations of all ranks in one order that agrees with the order on each."""
    columns: list[_Key] = []
    for lane in ranks:
        at = 0
        for _, number, group in lane["calls"]:
            if (group, number) in columns:
                at = columns.index((group, number)) + 1
                continue
            while at < len(columns) and columns[at][0] == group and columns[at][1] < number:
                at += 1
            columns.insert(at, (group, number))
            at += 1
    return columns


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
    return _figure(title, "; ".join(filter(None, [said, every])), "".join(parts), (wide, low), said)


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


def _figure(title: str, said: str, inside: str, size: tuple[int, int], caption: str) -> Markup:
    width, height = size[0] + 2, size[1] + 2
    return Markup(
        f'<figure><div class="wide"><svg role="img" width="{width}" height="{height}" '
        f'viewBox="-1 -1 {width} {height}"><title>{escape(title)}</title>'
        f"<desc>{escape(said)}</desc>{inside}</svg></div>"
        f"<figcaption><strong>{escape(title)}</strong> {escape(caption)}</figcaption></figure>"
    )
