"""What traces say in words: a table of setups, an operator diff, warnings, and all as JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from solution.measure.operators import Change
from solution.measure.trace_folder import RankTrace

__all__ = ["as_json", "diff_table", "setup_table", "warnings_of"]

Setups = dict[str, list[RankTrace]]
SHARES = ("compute_us", "exposed_us", "idle_us")


def setup_table(setups: Setups) -> str:
    """One line per rank: what a step takes, its parts, what was hidden, what was sent."""
    header: tuple[str, ...] = (
        *("setup", "rank", "steps", "step ms", "compute", "exposed", "idle"),
        *("overlapped", "collectives per step", "MB per step", "peak MB"),
    )
    rows = [header]
    for name, ranks in setups.items():
        rows += [(name, *_cells(rank.summary)) for rank in ranks]
    return _aligned(rows)


def diff_table(changes: list[Change], first: str, second: str, *, limit: int = 15) -> str:
    """The operators that one setup runs more often than the other."""
    header: tuple[str, ...] = (
        "operator",
        f"{first}: per step",
        f"{second}: per step",
        "difference",
        "ms per step",
    )
    rows = [header]
    rows += [
        (
            change.name,
            f"{change.first.count:g}",
            f"{change.second.count:g}",
            f"{change.count:+g}",
            f"{change.time_us / 1e3:+.3f}",
        )
        for change in changes[:limit]
    ]
    rest = len(changes) - limit
    return _aligned(rows) + (f"\n... and {rest} more" if rest > 0 else "")


def warnings_of(setups: Setups) -> list[str]:
    """What speaks against a comparison."""
    found = []
    for name, ranks in setups.items():
        for rank in ranks:
            counts = [step["optimizer_steps"] for step in rank.summary["steps"]]
            if set(counts) != {1}:
                found.append(
                    f"{name}, rank {rank.summary['rank']}: expected one optimizer step per "
                    f"ProfilerStep, got {counts}; its times are of another amount of work"
                )
    devices = {ranks[0].summary["device"] for ranks in setups.values()}
    if len(devices) > 1:
        found.append(f"expected traces of one device, got {sorted(devices)}; times do not compare")
    if "cpu" in devices:
        found.append(
            "no kernels on a CPU: times are of the host, with the profiler's own cost in them"
        )
    return found


def as_json(setups: Setups, changes: list[Change] | None) -> dict[str, Any]:
    """Everything, as plain data."""
    result: dict[str, Any] = {
        name: [
            {
                **rank.summary,
                "path": str(rank.path),
                "operators": {key: asdict(use) for key, use in rank.operators.items()},
                "memory": rank.memory,
                "timeline": rank.timeline,
            }
            for rank in ranks
        ]
        for name, ranks in setups.items()
    }
    diff = None if changes is None else [asdict(change) for change in changes]
    return {"setups": result, "diff": diff, "warnings": warnings_of(setups)}


def _cells(summary: dict[str, Any]) -> tuple[str, ...]:
    total, num_steps = summary["total"], len(summary["steps"])
    durations = [step["duration_us"] for step in summary["steps"]]
    collectives = summary["collectives"]
    kinds = (f"{entry['count'] / num_steps:g} {kind}" for kind, entry in collectives.items())
    sizes = [entry["bytes"] for entry in collectives.values()]
    fraction, peak = total["overlap_fraction"], summary["peak_memory_bytes"]
    return (
        str(summary["rank"]),
        str(num_steps),
        f"{statistics.median(durations) / 1e3:.2f}",
        *(f"{100 * total[key] / (total['duration_us'] or 1):.1f} %" for key in SHARES),
        "-" if fraction is None else f"{100 * fraction:.1f} %",
        ", ".join(kinds) or "-",
        "?" if None in sizes else f"{sum(sizes) / num_steps / 1e6:.3f}",
        "?" if peak is None else f"{peak / 1e6:.1f}",
    )


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
