"""Is a silent process blocked, or is it merely slow?

A rank is *blocked* when over a whole window none of its threads was runnable, it consumed
almost no processor time, and it has no child at work. Compiling or interpreting code is
slow and burns processor time, so it is never taken for a hang. A rank that waits for a processor
on a crowded machine is runnable, so it is not either.

Read from /proc; where there is none (macOS), nobody is ever called blocked and the time limit of
the call decides.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Gloo's event loop and the watcher thread wake now and then: this is far above, work far below.
_IDLE_SHARE = 0.05


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float
    is_waiting: bool


def _sample(pid: int) -> _Sample | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
    except OSError:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    is_waiting = not children and all(state in "SZ" for state in states)
    return _Sample(time.monotonic(), cpu_s, is_waiting)


@dataclass
class Liveness:
    """Watches one process; ask `is_blocked` every now and then, at least twice a window."""

    pid: int
    window_s: float
    _since: _Sample | None = field(default=None)

    def is_blocked(self) -> bool:
        """True once the process has been waiting, without progress, for the whole window."""
        now = _sample(self.pid)
        if now is None or not now.is_waiting:
            self._since = None
            return False
        if self._since is None:
            self._since = now
            return False
        elapsed = now.at_s - self._since.at_s
        if now.cpu_s - self._since.cpu_s > max(_IDLE_SHARE * elapsed, 2 / _TICKS_PER_S):
            self._since = now
            return False
        return elapsed >= self.window_s
