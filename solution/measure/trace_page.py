"""Traces as one page: tables, a time line per rank, memory over time. No scripts, nothing loaded.

The page is a single file of HTML with drawings in SVG, so it opens from anywhere and stays.
"""

from __future__ import annotations

from html import escape
from typing import Any

from solution.measure.operators import Change
from solution.measure.trace_folder import RankTrace
from solution.measure.trace_report import diff_table, setup_table, warnings_of

__all__ = ["Drawing", "memory_drawing", "page", "timeline_drawing"]

WIDTH, LANE = 900, 16
COLOURS = {"compute": "#4c78a8", "communication": "#f58518", "exposed": "#e45756"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
  color: #222 }
pre { font-size: 12px; background: #f6f6f6; padding: 1em; overflow-x: auto }
svg { max-width: 100%; height: auto; display: block; margin-bottom: .5em }
.key span { display: inline-block; width: 1em; height: .8em; margin: 0 .3em 0 1em }
"""


class Drawing(str):
    """SVG as text; a notebook shows the picture."""

    def _repr_html_(self) -> str:
        return str(self)


def page(setups: dict[str, list[RankTrace]], diff: tuple[str, str, list[Change]] | None) -> str:
    """The whole page.

    Args:
        setups: name to ranks.
        diff: names of two setups and what differs between them.
    """
    parts = ["<h1>Traces</h1>", f"<pre>{escape(setup_table(setups))}</pre>"]
    parts += [f"<p>{escape(text)}</p>" for text in warnings_of(setups)]
    parts.append(_key())
    for name, ranks in setups.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        longest = max(rank.timeline["duration_us"] for rank in ranks)
        for rank in ranks:
            step = rank.timeline["step"]
            parts.append(
                f"<p>rank {rank.summary['rank']}, step {step}: "
                f"{rank.timeline['duration_us'] / 1e3:.2f} ms</p>"
            )
            parts.append(timeline_drawing(rank.timeline, longest_us=longest))
        if any(rank.memory for rank in ranks):
            parts.append("<p>memory allocated since the recording began, per rank</p>")
            parts.append(memory_drawing([rank.memory for rank in ranks]))
    if diff is not None:
        first, second, changes = diff
        parts.append(f"<h2>{escape(first)} and {escape(second)}</h2>")
        parts.append(f"<pre>{escape(diff_table(changes, first, second))}</pre>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Traces</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def timeline_drawing(timeline: dict[str, Any], *, longest_us: float | None = None) -> Drawing:
    """One step of one rank in SVG: computation, communication, and what of it is exposed.

    Args:
        timeline: of `Lanes.from_begin`.
        longest_us: what fills the whole width; None takes the step's own duration.
    """
    scale = WIDTH / (longest_us or timeline["duration_us"] or 1)
    height = LANE * len(COLOURS)
    bars = [
        f'<rect x="0" y="0" width="{timeline["duration_us"] * scale:.2f}" height="{height}" '
        'fill="#eee"/>'
    ]
    for row, (lane, colour) in enumerate(COLOURS.items()):
        for begin, end in _visible(timeline[lane], 0.4 / scale):
            bars.append(
                f'<rect class="{lane}" x="{begin * scale:.2f}" y="{row * LANE + 2}" '
                f'width="{(end - begin) * scale:.2f}" height="{LANE - 4}" fill="{colour}"/>'
            )
    text = f"rank {timeline['rank']}, step {timeline['step']}"
    return Drawing(
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text}">{"".join(bars)}</svg>'
    )


def memory_drawing(ranks: list[list[tuple[float, int]]]) -> Drawing:
    """Bytes over time of all ranks, in SVG."""
    height = 80
    longest = max((at for points in ranks for at, _ in points), default=1) or 1
    largest = max((total for points in ranks for _, total in points), default=1) or 1
    lines = []
    for index, points in enumerate(ranks):
        places = " ".join(
            f"{at / longest * WIDTH:.1f},{height - max(0, total) / largest * (height - 4):.1f}"
            for at, total in points
        )
        colour = ("#4c78a8", "#54a24b", "#b279a2", "#9d755d")[index % 4]
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
    return Drawing(
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="memory over time">'
        f'<text x="2" y="12" font-size="11">{largest / 1e6:.1f} MB</text>{"".join(lines)}</svg>'
    )


def _visible(intervals: list[list[float]], gap: float) -> list[list[float]]:
    """Neighbours nearer than `gap` are drawn as one: a page of a million boxes opens nowhere."""
    drawn: list[list[float]] = []
    for begin, end in intervals:
        if drawn and begin - drawn[-1][1] < gap:
            drawn[-1][1] = end
        else:
            drawn.append([begin, end])
    return drawn


def _key() -> str:
    marks = "".join(
        f'<span style="background:{colour}"></span>{lane}' for lane, colour in COLOURS.items()
    )
    return f'<p class="key">one step per rank:{marks}</p>'
