"""Charts as SVG text, drawn by hand: no library, no script, colours of the page's own style.

Each is a figure with a title for screen readers; whatever a colour says, a label or a table beside
it says as well. Sizes are in units of the drawing, which scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["HUES", "bars", "dash", "lines", "stacks", "timeline"]

WIDTH = 860
HUES = [f"var(--hue-{number})" for number in range(1, 7)]
DASHES = ["", "9 5", "3 4", "12 4 3 4", "2 7", "16 6"]

Series = Sequence[tuple[str, Sequence[float]]]


def lines(series: Series, *, title: str, y: str, is_log: bool = False) -> str:
    """Curves over steps 1, 2, ...; the first is broad, so that others lie visibly on top of it.

    With `is_log`, zeros (equal to the bit) are drawn on the floor of the chart.
    """
    height, left, right, top, bottom = 300, 70, 20, 14, 44
    values = [value for _, ys in series for value in ys if value > 0 or not is_log]
    low, high = (min(values), max(values)) if values else (1e-9, 1e-8)
    ticks = _log_ticks(low, high) if is_log else _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    num_steps = max(len(ys) for _, ys in series)

    def across(step: int) -> float:
        return left + (WIDTH - left - right) * step / max(num_steps - 1, 1)

    def down(value: float) -> float:
        share = _share(max(value, low), low, high, is_log)
        return top + (height - top - bottom) * (1 - share)

    parts = []
    for tick in ticks:
        words = f"{tick:.0e}" if is_log else f"{tick:g}"
        parts.append(_rule(left, WIDTH - right, down(tick)))
        parts.append(_text(left - 8, down(tick) + 4, words, "end"))
    shown = sorted({0, *range(4, num_steps, 5), num_steps - 1})
    parts += [_text(across(i), height - 22, str(i + 1), "middle") for i in shown]
    parts.append(_text((left + WIDTH) / 2, height - 4, "step", "middle"))
    for number, (label, ys) in enumerate(series):
        points = " ".join(f"{across(i):.1f},{down(value):.1f}" for i, value in enumerate(ys))
        is_broad = number == 0 and not is_log
        style = f"stroke:{HUES[number % len(HUES)]};"
        style += "stroke-width:7;opacity:.35" if is_broad else "stroke-width:1.8"
        parts.append(
            f'<polyline points="{points}" style="{style}" stroke-dasharray="{dash(number)}" '
            f'fill="none"><title>{escape(label)}</title></polyline>'
        )
    return _figure(parts, height, title, y)


def bars(rows: Sequence[tuple[str, float, str]], *, title: str, y: str) -> str:
    """Horizontal bars: label, length, words behind it."""
    left, right, step = 190, 130, 30
    most = max((value for _, value, _ in rows), default=0) or 1
    parts = []
    for number, (label, value, words) in enumerate(rows):
        at, length = 8 + number * step, (WIDTH - left - right) * value / most
        parts.append(_text(left - 10, at + 16, label, "end"))
        parts.append(_rect(left, at, max(length, 1), 22, style=f"fill:{HUES[0]}"))
        parts.append(_text(left + length + 8, at + 16, words))
    return _figure(parts, 12 + step * len(rows), title, y)


def stacks(
    rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]],
    *,
    names: Sequence[str],
    title: str,
    y: str,
) -> str:
    """Two horizontal stacks per row: what was measured, and below it, thinner, the prediction."""
    left, right, step = 190, 130, 52
    most = max((max(sum(a.values()), sum(b.values())) for _, a, b in rows), default=0) or 1
    scale = (WIDTH - left - right) / most
    parts = []
    for number, (label, measured, predicted) in enumerate(rows):
        at = 8 + number * step
        parts.append(_text(left - 10, at + 16, label, "end"))
        for values, top, height, opacity in ((measured, 0, 20, 1), (predicted, 24, 10, 0.55)):
            begin = float(left)
            for index, name in enumerate(names):
                style = f"fill:{HUES[index]};opacity:{opacity}"
                length = values.get(name, 0) * scale
                parts.append(_rect(begin, at + top, length, height, style=style))
                begin += length
            mebibytes = f"{sum(values.values()) / 2**20:.1f} MiB"
            if top:
                parts.append(_text(begin + 8, at + 33, f"{mebibytes} predicted", kind="minor"))
            else:
                parts.append(_text(begin + 8, at + 16, mebibytes))
    return _figure(parts, 8 + step * len(rows), title, y)


def timeline(ranks: Sequence[Mapping[str, Any]], *, longest_us: float, title: str) -> str:
    """One step: per rank a lane of computation and one of communication, overlap shaded across."""
    left, right, lane, gap = 150, 20, 18, 14
    scale = (WIDTH - left - right) / longest_us
    parts: list[str] = []

    def blocks(intervals: Sequence[Sequence[float]], at: float, height: float, kind: str) -> None:
        parts.extend(
            _rect(left + begin * scale, at, max((end - begin) * scale, 0.3), height, kind=kind)
            for begin, end in intervals
        )

    for number, found in enumerate(ranks):
        at = 6 + number * (2 * lane + gap)
        for below, kind in enumerate(("compute", "communication")):
            top = at + below * (lane + 2)
            parts.append(_text(left - 8, top + 13, f"rank {found['rank']} {kind}", "end", "minor"))
            parts.append(_rule(left, left + found["duration_us"] * scale, top + lane))
            blocks(found[kind], top + 2, lane - 4, kind)
        blocks(found["overlap"], at - 2, 2 * lane + 6, "overlap")
    bottom = 6 + len(ranks) * (2 * lane + gap)
    for tick in _ticks(0, longest_us / 1000)[:-1]:
        where = left + tick * 1000 * scale
        parts.append(_text(where, bottom + 8, f"{tick:g} ms", "middle", "minor"))
    return _figure(parts, bottom + 14, title, "")


def dash(number: int) -> str:
    """The dashes of a curve, so that no two share both hue and dashes."""
    return DASHES[(number // len(HUES) * 2 + number % 2 * (number > 1)) % len(DASHES)]


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rule(begin: float, end: float, y: float) -> str:
    return f'<line class="grid" x1="{begin:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _rect(
    x: float, y: float, width: float, height: float, *, style: str = "", kind: str = ""
) -> str:
    look = f'style="{style}"' if style else f'class="{kind}"'
    return f'<rect {look} x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"/>'


def _figure(parts: Sequence[str], height: float, title: str, y: str) -> str:
    caption = f"<figcaption>{escape(y)}</figcaption>" if y else ""
    return (
        f'<figure>{caption}<svg role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {WIDTH} {height:g}">{"".join(parts)}</svg></figure>'
    )


def _share(value: float, low: float, high: float, is_log: bool) -> float:
    if is_log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return (value - low) / ((high - low) or 1)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers around a range.

    >>> _ticks(5.3, 7.7)
    [5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0]
    """
    span = (high - low) or abs(high) or 1.0
    magnitude = 10 ** math.floor(math.log10(span / wanted))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= span / wanted)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around a range.

    >>> _log_ticks(3e-7, 2e-5)
    [1e-07, 1e-06, 1e-05, 0.0001]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]
