"""A batch-size sweep as a picture, where matplotlib is installed (extra `plots`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["can_plot", "plot_sweep"]

MIB = 2**20


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_sweep(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, peak: str) -> None:
    """Tokens per second and peak memory over the batch size.

    Args:
        rows: of `sweep_batch_sizes`; what did not fit is marked and has no bar.
        path: the PNG to write.
        title: of the picture.
        peak: what the peak is: "peak", or "predicted peak".
    """
    from matplotlib.figure import Figure  # here: half a second, and optional

    figure = Figure(figsize=(7, 6), layout="constrained")
    rates, peaks = figure.subplots(2, 1, sharex=True)
    names = [str(row["batch_size"]) for row in rows]
    for axes, values, unit in (
        (rates, [row["tokens_per_s"] or 0 for row in rows], "tokens/s"),
        (peaks, [(row["peak_bytes"] or 0) / MIB for row in rows], f"{peak} (MiB)"),
    ):
        axes.bar(names, values)
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
    for position, row in enumerate(rows):
        if row["is_oom"]:
            rates.annotate("out of memory", (position, 0), rotation=90, ha="center", va="bottom")
    rates.set_title(title)
    peaks.set_xlabel("batch size (sequences)")
    figure.savefig(path, dpi=120)
