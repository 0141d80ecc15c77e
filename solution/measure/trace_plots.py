"""Traces as pictures, where matplotlib is installed (extra `plots`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from solution.measure.trace_folder import RankTrace

__all__ = ["draw", "is_available"]

PARTS = {
    "compute_us": "#4c78a8",
    "exposed_us": "#e45756",
    "idle_us": "#dddddd",
}


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(setups: dict[str, list[RankTrace]], path: Path) -> Path:
    """A bar per rank, of compute, exposed communication and idle, in ms per step; memory below.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    if not is_available():
        raise RuntimeError(
            "expected matplotlib for plots, got none; pip install 'trainspec[plots]', or leave "
            "them out with --no-plots"
        )
    from matplotlib.figure import Figure  # here: half a second, and optional

    bars = {
        f"{name} {rank.summary['rank']}": rank for name, ranks in setups.items() for rank in ranks
    }
    figure = Figure(figsize=(9, 2.5 + 0.35 * len(bars)), layout="constrained")
    times, memory = figure.subplots(2, 1, height_ratios=[max(2, len(bars)), 4])
    left = [0.0] * len(bars)
    for part, colour in PARTS.items():
        widths = [
            rank.summary["total"][part] / len(rank.summary["steps"]) / 1e3 for rank in bars.values()
        ]
        times.barh(list(bars), widths, left=left, color=colour, label=part.removesuffix("_us"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times.invert_yaxis()
    times.set(xlabel="ms per step, mean of the recorded ones")
    times.legend()
    for name, rank in bars.items():
        if rank.memory:
            xs, ys = zip(*rank.memory, strict=True)
            memory.plot([x / 1e3 for x in xs], [y / 1e6 for y in ys], label=name)
    memory.set(xlabel="ms since the first recorded step", ylabel="MB allocated")
    if any(rank.memory for rank in bars.values()):
        memory.legend(fontsize="small")
    figure.savefig(path)
    return path
