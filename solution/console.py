"""The progress of a run at a terminal: one line that overwrites itself.

Nothing is written where stderr is not a terminal, so logs hold no control characters.
"""

from __future__ import annotations

import sys


def status_line(text: str) -> None:
    """Replace the line under the cursor by `text`; the empty text clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def progress_bar(done: int, total: int, text: str = "", *, width: int = 30) -> None:
    """Show `done` of `total`; cleared when they are equal."""
    filled = width * done // max(1, total)
    bar = "#" * filled + "." * (width - filled)
    status_line(f"[{bar}] {done}/{total} {text}" if done < total else "")
