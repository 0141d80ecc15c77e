"""What the machine and this process report about themselves: cores and memory.

Read from /proc and from glibc's malloc; where there is neither, functions return None, or 0 bytes.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch


def busy_s() -> float | None:
    """Return the seconds that all cores have been busy since boot; None where not reported."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def share_of_others(busy: float | None, own: float, elapsed: float) -> float:
    """Return the part of all cores that other processes used: `busy` and `own` in core seconds.

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
    """Return whether malloc reports how much it has given out (glibc 2.33 or newer)."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def allocated_bytes() -> int:
    """Return the bytes in use of this process's malloc, whoever asked for them; else 0."""
    if not can_count_allocations():
        return 0
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    counts = mallinfo2()
    return int(counts.uordblks + counts.hblkhd)


def resident_bytes() -> int | None:
    """Return this process's resident memory; None if not reported."""
    found = _fields("/proc/self/status").get("VmRSS")
    return None if found is None else int(found.split()[0]) * 1024


def _fields(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """Return what a table must say about where it was measured, and by which command."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")]
    libc, cpu = " ".join(platform.libc_ver()), _fields("/proc/cpuinfo").get("model name")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": f"{cpu or platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "allocator": f"{libc or 'system malloc'}, {' '.join(settings) or 'default settings'}"
        + (f", LD_PRELOAD={os.environ['LD_PRELOAD']}" if "LD_PRELOAD" in os.environ else ""),
        "command": " ".join(["python -m spec_tests.bench", *arguments]),
    }
