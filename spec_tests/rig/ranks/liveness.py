"""Is a silent process blocked, or is it merely slow?

A rank is *blocked* when over a whole window it consumed almost no processor time and no thread
wanted a processor at every look. Compiling or interpreting code is slow and burns processor time,
so it is never taken for a hang. A rank that starves on a crowded machine wants a processor whenever
one looks, so it is not either; whereas the event loop of a blocked rank wakes now and then, and on
such a machine is sometimes seen waiting for its turn. Neither is one that gets on slowly, a
collective now and a sleep then: what it has issued is compared as well. What its child processes
do, it does: torch.compile waits for compilers, a loader for its workers. A worker that waits for a
network and hands over a batch now and then gets on too: what children read and write is compared.

Read from /proc; where there is none (macOS), nobody is ever called blocked and the time limit of
the call decides.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Gloo's event loop and the watcher thread wake now and then: this is far above, work far below.
_IDLE_SHARE = 0.05
# Between two looks; the pool looks five times a second.
_MAX_GAP_S = 0.8


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float
    working: frozenset[str]  # threads that run or want to, and "child" if a descendant does
    moved: frozenset[tuple[int, str]] = frozenset()  # descendants, and what they read and wrote


def _sample(pid: int) -> _Sample | None:
    try:
        ticks = _stat(Path(f"/proc/{pid}"))[1]
        states = {task.name: _stat(task)[0] for task in Path(f"/proc/{pid}/task").iterdir()}
    except OSError:
        return None
    below = _descendants(pid)
    working = {name for name, state in states.items() if state not in "SZ"}
    working |= {"child" for state, _ in below.values() if state not in "SZ"}
    cpu_s = (ticks + sum(spent for _, spent in below.values())) / _TICKS_PER_S
    moved = frozenset((child, _traffic(child)) for child in below)
    return _Sample(time.monotonic(), cpu_s, frozenset(working), moved)


def _stat(folder: Path) -> tuple[str, int]:
    """State, and ticks spent by itself and by children that it has seen end."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return fields[0], sum(map(int, fields[11:15]))


def _descendants(pid: int) -> dict[int, tuple[str, int]]:
    found = {}
    with contextlib.suppress(OSError):  # it ends while one looks
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    found[child] = _stat(Path(f"/proc/{child}"))
                    found |= _descendants(child)
    return found


def _traffic(pid: int) -> str:
    """What it has read and written so far: files, pipes."""
    with contextlib.suppress(OSError):  # not readable everywhere
        return Path(f"/proc/{pid}/io").read_text()
    return ""


@dataclass
class Liveness:
    """Watches one process; ask `is_blocked` every now and then, several times a window.

    Attributes:
        pid: the process.
        window_s: how long it must have been blocked.
        progress: something that changes while the process gets on without much processor time, such
            as the number of collectives that it has issued. Asked twice a window.
    """

    pid: int
    window_s: float
    progress: Callable[[], object] = field(default=lambda: None)
    _since: _Sample | None = field(default=None)
    _last_s: float = field(default=0.0)
    _working: frozenset[str] = field(default=frozenset())
    _token: object = field(default=None)

    @property
    def is_idle(self) -> bool:
        """True if it has done nothing since some looks ago; a window need not be full."""
        return self._since is not None and self._last_s - self._since.at_s > min(
            1.0, 0.5 * self.window_s
        )

    def is_blocked(self) -> bool:
        """True once the process has been waiting, without progress, for the whole window."""
        now = _sample(self.pid)
        if now is None or self._since is None:
            return self._begin(now)
        gap, self._last_s = now.at_s - self._last_s, now.at_s
        if gap > _MAX_GAP_S:  # the one who looks was itself kept waiting: it has seen too little
            return self._begin(now)
        elapsed = now.at_s - self._since.at_s
        if now.cpu_s - self._since.cpu_s > max(_IDLE_SHARE * elapsed, 2 / _TICKS_PER_S):
            return self._begin(now)
        if now.moved != self._since.moved:
            return self._begin(now)
        self._working &= now.working
        if elapsed < self.window_s:
            return False
        if self._working or self.progress() != self._token:
            return self._begin(now)
        return True

    def _begin(self, now: _Sample | None) -> bool:
        self._since, self._working = now, now.working if now is not None else frozenset()
        self._last_s = now.at_s if now is not None else 0.0
        self._token = self.progress()
        return False
