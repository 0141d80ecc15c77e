"""What traces show: a table of setups, an operator diff, warnings, drawings, a page and JSON.

The page (`traces.html.jinja`) is one file of HTML with drawings in SVG: it opens from anywhere.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from solution.console import aligned
from solution.measure.intervals import merged
from solution.measure.trace_folder import RankTrace

__all__ = [
    *("Drawing", "as_json", "diff_table", "memory_drawing", "page", "setup_table"),
    *("timeline_drawing", "warnings_of"),
]

Setups = dict[str, list[RankTrace]]
Changes = list[dict[str, Any]]  # of `difference_of`
MOST_CHANGES = 15  # operators that are listed


def setup_table(setups: Setups) -> str:
    """Return one line per rank: what a step takes, its parts, what was hidden, what was sent."""
    header = (
        *("setup", "rank", "steps", "step ms", "compute", "exposed", "idle"),
        *("overlapped", "collectives per step", "MB per step", "peak MB"),
    )
    rows = [(name, *_cells(rank)) for name, ranks in setups.items() for rank in ranks]
    return aligned([header, *rows])


def _cells(summary: RankTrace) -> tuple[str, ...]:
    total, num_steps = summary["total"], len(summary["steps"])
    durations = [step["duration_us"] for step in summary["steps"]]
    collectives = summary["collectives"]
    kinds = (f"{entry['count'] / num_steps:g} {kind}" for kind, entry in collectives.items())
    sizes = [entry["bytes"] for entry in collectives.values()]
    fraction, peak = total["overlap_fraction"], summary["peak_memory_bytes"]
    parts = [total[key] / (total["duration_us"] or 1) for key in ("compute_us", "exposed_us")]
    parts.append(total["idle_us"] / (total["duration_us"] or 1))
    return (
        str(summary["rank"]),
        str(num_steps),
        f"{statistics.median(durations) / 1e3:.2f}",
        *(f"{100 * part:.1f} %" for part in parts),
        "-" if fraction is None else f"{100 * fraction:.1f} %",
        ", ".join(kinds) or "-",
        "?" if None in sizes else f"{sum(sizes) / num_steps / 1e6:.3f}",
        "?" if peak is None else f"{peak / 1e6:.1f}",
    )


def diff_table(changes: Changes, first: str, second: str) -> str:
    """Return the operators that one setup runs more often than the other."""
    header = ("operator", f"{first}: per step", f"{second}: per step", "difference", "ms per step")
    rows = []
    for change in changes[:MOST_CHANGES]:
        (count_a, us_a), (count_b, us_b) = change["first"].values(), change["second"].values()
        counts = (f"{count_a:g}", f"{count_b:g}", f"{count_b - count_a:+g}")
        rows.append((change["name"], *counts, f"{(us_b - us_a) / 1e3:+.3f}"))
    rest = len(changes) - MOST_CHANGES
    return aligned([header, *rows]) + (f"\n... and {rest} more" if rest > 0 else "")


def warnings_of(setups: Setups) -> list[str]:
    """Return the reasons why a comparison of these setups would mislead."""
    found = []
    for name, ranks in setups.items():
        for rank in ranks:
            counts = [step["optimizer_steps"] for step in rank["steps"]]
            if set(counts) != {1}:
                found.append(
                    f"{name}, rank {rank['rank']}: expected one optimizer step per "
                    f"ProfilerStep, got {counts}; its times are of another amount of work"
                )
    devices = {ranks[0]["device"] for ranks in setups.values()}
    if len(devices) > 1:
        found.append(f"expected traces of one device, got {sorted(devices)}; times do not compare")
    if "cpu" in devices:
        found.append(
            "no kernels on a CPU: times are of the host, with the profiler's own cost in them"
        )
    return found


def as_json(setups: Setups, changes: Changes | None) -> dict[str, Any]:
    """Return everything as plain data."""
    return {"setups": setups, "diff": changes, "warnings": warnings_of(setups)}


class Drawing(str):
    """SVG as text; a notebook shows the picture."""

    def _repr_html_(self) -> str:
        return str(self)


def timeline_drawing(timeline: dict[str, Any], *, longest_us: float | None = None) -> Drawing:
    """Draw one step of one rank: computation, communication, and what of it is exposed.

    Args:
        timeline: of `Lanes.from_begin`.
        longest_us: what fills the whole width; None takes the step's own duration.
    """
    return Drawing(_template("drawings.svg.jinja").module.timeline(timeline, longest_us))


def memory_drawing(ranks: list[list[tuple[float, int]]]) -> Drawing:
    """Draw the bytes over time of all ranks."""
    return Drawing(_template("drawings.svg.jinja").module.memory(ranks))


def page(setups: Setups, diff: tuple[str, str, Changes] | None) -> str:
    """Return the whole page.

    Args:
        setups: name to ranks.
        diff: names of two setups and what differs between them.
    """
    shown = None
    if diff is not None:
        first, second, changes = diff
        shown = {"title": f"{first} and {second}", "table": diff_table(changes, first, second)}
    table, warnings = setup_table(setups), warnings_of(setups)
    template = _template("traces.html.jinja")
    return template.render(setups=setups, table=table, warnings=warnings, diff=shown).lstrip()


def _template(name: str) -> Any:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder, autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["merged"] = merged
    return environment.get_template(name)
