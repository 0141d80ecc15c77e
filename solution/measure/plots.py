"""Measurements as PNG pictures, where matplotlib is installed (extra `plots`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
PARTS = {"compute_us": "#4c78a8", "exposed_us": "#e45756", "idle_us": "#dddddd"}


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def empty_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    if not can_plot():
        raise RuntimeError(
            "expected matplotlib for plots, got none; pip install 'trainspec[plots]', or leave "
            "them out with --no-plots"
        )
    from matplotlib.figure import Figure  # here: half a second, and optional

    return Figure(figsize=(width, height), layout="constrained")


def plot_memory(peaks: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """Draw the highest moment of each phase (to term to bytes), its terms on top of one another."""
    figure = empty_figure(7, 4)
    axes = figure.subplots()
    below = [0.0] * len(peaks)
    for name in sorted({name for terms in peaks.values() for name in terms}):
        sizes = [terms.get(name, 0) / MIB for terms in peaks.values()]
        axes.bar(list(peaks), sizes, bottom=below, label=name)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.set(ylabel="MiB", title="highest moment of each phase")
    axes.legend()
    figure.savefig(path)


def plot_sweep(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, peak: str) -> None:
    """Draw tokens per second and peak memory over the batch size, of rows of `sweep_batch_sizes`.

    A size that did not fit is marked and has no bar. `peak` says what it is: "predicted peak".
    """
    figure = empty_figure(7, 6)
    rates, peaks = figure.subplots(2, 1, sharex=True)
    names = [str(row["batch_size"]) for row in rows]
    rates.bar(names, [row["tokens_per_s"] or 0 for row in rows])
    peaks.bar(names, [(row["peak_bytes"] or 0) / MIB for row in rows])
    for position, row in enumerate(rows):
        if row["is_oom"]:
            rates.annotate("out of memory", (position, 0), rotation=90, ha="center", va="bottom")
    rates.set(ylabel="tokens/s", title=title)
    peaks.set(ylabel=f"{peak} (MiB)", xlabel="batch size (sequences)")
    figure.savefig(path, dpi=120)


def plot_traces(setups: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw a bar per rank, of compute, exposed communication and idle, in ms per step; and memory.

    Of each setup the ranks, as `solution.measure.traces` reads them.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    bars = {f"{name} {rank['rank']}": rank for name in setups for rank in setups[name]}
    figure = empty_figure(9, 2.5 + 0.35 * len(bars))
    times, memory = figure.subplots(2, 1, height_ratios=[max(2, len(bars)), 4])
    left = [0.0] * len(bars)
    for part, colour in PARTS.items():
        widths = [one["total"][part] / len(one["steps"]) / 1e3 for one in bars.values()]
        times.barh(list(bars), widths, left=left, color=colour, label=part.removesuffix("_us"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times.invert_yaxis()
    times.set(xlabel="ms per step, mean of the recorded ones")
    times.legend()
    for name, rank in bars.items():
        if rank["memory"]:
            at, sizes = zip(*rank["memory"], strict=True)
            memory.plot([x / 1e3 for x in at], [size / 1e6 for size in sizes], label=name)
    memory.set(xlabel="ms since the first recorded step", ylabel="MB allocated")
    if memory.lines:
        memory.legend(fontsize="small")
    figure.savefig(path)
