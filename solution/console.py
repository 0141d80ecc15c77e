"""The terminal: a line that overwrites itself while data is prepared, and tables.

Of the line nothing is written where stderr is not a terminal, so logs hold no control characters.
"""

import sys
from collections.abc import Sequence


def status_line(text: str) -> None:
    """Replace the line under the cursor by `text`; the empty text clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table: the first column to the left, the others to the right.

    >>> print(aligned([("", "ms"), ("ours", "7.25"), ("theirs", "12.5")]))
              ms
    ours    7.25
    theirs  12.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )
