"""The watched command: a child in a session of its own, and signals that are handed on to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def handed_on(child: Any) -> Iterator[None]:
    """Hand signals that end a job on to the command, whose session is another one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(n, lambda number, _: child.stop(number)) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Child:
    """The command, in a session of its own with all that it starts."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return self._process.wait()

    def stop(self, number: int) -> None:
        """Ask all to end with a signal, then end them."""
        for each in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
