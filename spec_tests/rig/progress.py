"""What a run is doing while it runs: one line on a terminal, a line per minute in a file.

The line on a terminal is drawn from the first second on and redrawn each second by a thread, so
that a slow or hanging clause is seen to be waited for. Nothing heavy is imported: the line is there
before torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import ClassVar, NoReturn, TextIO

_ERASE = "\r\x1b[K"


class Progress:
    """A line that `say` replaces; `close` removes it.

    Args:
        stream: where it goes; not a captured `sys.stdout`.
        is_terminal: redraw in place each second; else append a line each minute.
    """

    current: ClassVar[Progress | None] = None
    """What `start` began; a run of pytest itself shows what pytest shows."""

    def __init__(self, stream: TextIO, *, is_terminal: bool) -> None:
        self._stream, self._is_terminal = stream, is_terminal
        self._what = "loading torch and the clauses"
        self._began_s = time.monotonic()
        self._lock, self._ended = threading.RLock(), threading.Event()
        self.is_to_end = False

    @classmethod
    def start(cls) -> Progress:
        """Show the progress of the one run of this process on its standard output."""
        # A duplicate: pytest redirects the descriptor itself while a test runs.
        stream = open(os.dup(1), "w", encoding="utf-8", errors="replace")  # noqa: PTH123, SIM115
        shown = cls(stream, is_terminal=stream.isatty() and os.environ.get("TERM") != "dumb")
        threading.Thread(target=shown._redraw, name="progress", daemon=True).start()
        cls.current = shown
        return shown

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began_s

    def say(self, what: str) -> None:
        """Replace what is shown."""
        self._what = what

    def interrupt(self, number: int, frame: object) -> NoReturn:
        """Handle a signal that asks for the end; whoever swallows this looks at `is_to_end`."""
        self.is_to_end = True
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Write other lines in this block: the line is erased, and drawn again within a second."""
        with self._lock:
            self._erase()
            yield

    def close(self) -> None:
        """Remove the line for good."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self._erase()

    def draw(self) -> None:
        """Write the line once, as the thread does."""
        with self._lock:
            if self._ended.is_set():
                return
            if self._is_terminal:
                width = shutil.get_terminal_size().columns - 1  # the last column would wrap
                # The cursor goes back, so that whatever else is written replaces the line.
                self._stream.write(
                    f"{_ERASE}{self.seconds:4.0f} s  {self._what}"[: width + 4] + "\r"
                )
            else:
                self._stream.write(f"after {self.seconds / 60:.0f} min: {self._what}\n")
            self._stream.flush()

    def _erase(self) -> None:
        if self._is_terminal:
            self._stream.write(_ERASE)
            self._stream.flush()

    def _redraw(self) -> None:
        if self._is_terminal:
            self.draw()
        while not self._ended.wait(1 if self._is_terminal else 60):
            self.draw()
