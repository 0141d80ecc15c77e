"""Paired measurement: how much faster is B than A, on a machine that does other things too?

Two runs one after the other compare the machine with itself. So both are measured in one process
tree, a little of each in turn, and what counts is the ratio inside a round, in which both met the
same machine:

1. `order` gives the arms of a round; every other round runs backwards (A B C, C B A, ...), so
   that whoever is measured first has no lasting advantage.
2. A block's time is the maximum over ranks: a step is over when the slowest rank is.
3. Rounds in which other processes used more than `MAX_OTHERS` of the cores are dropped.
4. `Ratio` is the median over rounds with its 95 % interval: order statistics, no assumption about
   the noise. "B is at most r times A" means that the upper end is at most r.
5. An arm that is A once more (A/A) shows what the machine does to equal things. When its median
   leaves `AA_RANGE`, the whole run is void.

Pure arithmetic and files under /proc; whom to measure, and how, is the caller's.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

MAX_OTHERS = 0.08
AA_RANGE = (0.97, 1.03)
FEWEST_ROUNDS = 6  # below this no pair of order statistics covers a median with 95 %


def order(num_arms: int, round_index: int) -> list[int]:
    """Arms of a round in the order in which they are measured.

    >>> order(3, 0), order(3, 1)
    ([0, 1, 2], [2, 1, 0])
    """
    arms = list(range(num_arms))
    return arms if round_index % 2 == 0 else arms[::-1]


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios with the ends of its 95 % interval, over `num_rounds` pairs."""

    median: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(measured: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """`measured[i] / baseline[i]`, where both were measured in the same round.

    >>> str(ratio([2.0] * 10, [4.0] * 10))
    '0.500 [0.500, 0.500]'
    """
    pairs = sorted(m / b for m, b in zip(measured, baseline, strict=True))
    low, high = median_interval(pairs)
    return Ratio(statistics.median(pairs), low, high, len(pairs))


def median_interval(values: Sequence[float], *, miss: float = 0.05) -> tuple[float, float]:
    """Two of the sorted `values` that enclose their true median but for a probability of `miss`.

    A value lies below the median with probability 1/2, so the number that do is binomial.

    >>> median_interval([float(i) for i in range(1, 11)])
    (2.0, 9.0)
    """
    number = len(values)
    if number < FEWEST_ROUNDS:
        return (-math.inf, math.inf)
    below, outside = 0, 0.0
    while True:
        outside += math.comb(number, below) / 2**number
        if 2 * outside > miss:
            break
        below += 1
    return values[below - 1], values[number - below]


def is_void(aa: Ratio) -> bool:
    """Whether equal things did not come out equal."""
    return not AA_RANGE[0] <= aa.median <= AA_RANGE[1]


def busy_s() -> float | None:
    """Seconds that all cores of this machine have been busy since boot; None where not told."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def share_of_others(busy: float | None, own: float, elapsed: float) -> float:
    """Part of all cores that other processes used: `busy` and `own` in core seconds.

    >>> share_of_others(busy=2.5, own=2.0, elapsed=1.0) * (os.cpu_count() or 1)
    0.5
    """
    if busy is None:
        return 0.0
    return max(0.0, busy - own) / (elapsed * (os.cpu_count() or 1))


class _Mallinfo2(ctypes.Structure):
    # Of ten counters two matter here: bytes in use of heaps, and of blocks mapped by themselves.
    _fields_ = (
        ("unused_0_to_3", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("unused_5_to_6", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("unused_8_to_9", ctypes.c_size_t * 2),
    )


def can_count_allocations() -> bool:
    """Whether this system's malloc tells how much it has given out (glibc 2.33 or newer)."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def allocated_bytes() -> int:
    """Bytes in use of this process's malloc, whoever asked for them; 0 where it does not tell."""
    if not can_count_allocations():
        return 0
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    counts = mallinfo2()
    return int(counts.uordblks + counts.hblkhd)


def environment() -> dict[str, str]:
    """What a table must say about where it was measured."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")]
    libc = " ".join(platform.libc_ver())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": f"{_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "allocator": f"{libc or 'system malloc'}, {' '.join(settings) or 'default settings'}"
        + (f", LD_PRELOAD={os.environ['LD_PRELOAD']}" if "LD_PRELOAD" in os.environ else ""),
        "command": " ".join(["python -m spec_tests.benchmarks", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of `rows`, the first of which is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(folder: Path, name: str, text: str, record: dict[str, Any]) -> None:
    """Keep what was measured: `NAME.md` to read, `NAME.json` to compute with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
