"""Whether the main thread is inside a collective, from its frames and from what the kernel says."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import torch

_TORCH = Path(torch.__file__).parent
_COLLECTIVE = tuple(
    str(_TORCH / each) for each in ("distributed/", "nn/parallel/distributed.py", "autograd/graph")
)
# These read and write files, start processes, or run the launcher: they wait for no other rank.
_OTHERS = tuple(
    str(_TORCH / "distributed" / each) for each in ("checkpoint", "elastic", "launcher", "run.py")
)
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


def is_blocked(frame: Any, thread: int | None, is_pending: bool) -> bool:
    """Return whether a thread waits in a collective.

    Args:
        frame: the innermost frame of the thread.
        thread: its number in the kernel.
        is_pending: a collective that this process has begun has not ended.
    """
    code = None if frame is None else frame.f_code
    if code is None:
        return False
    if code.co_name == "<module>" and code.co_filename.startswith(str(_TORCH)):
        return False  # torch is being imported
    if code.co_filename.startswith(_OTHERS):
        return False
    if code.co_filename.startswith(_COLLECTIVE):
        return True
    # `work.wait()` and `loss.item()` are native calls of the script's own frame, as is a sleep.
    return is_pending and _is_in_futex(thread)


def _is_in_futex(thread: int | None) -> bool:
    """Return whether a thread waits for another one; True where the kernel does not say."""
    try:
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return True
    return _FUTEX is None or call in (_FUTEX, "running")


def handled_error(thread: int | None) -> BaseException | None:
    """Return the exception that a thread is handling, in an `except` or a `finally`."""
    found: Any = sys._current_exceptions().get(thread or 0)
    error = found[1] if isinstance(found, tuple) else found  # a triple in Python 3.11
    return error if isinstance(error, BaseException) else None
