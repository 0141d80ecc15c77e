"""Numbers and tables as text, and lines on stdout."""

import math
import sys
from collections.abc import Sequence


def significant(value: float, digits: int = 4, *, decimals: int = 0) -> str:
    """Return a number with at least so many significant digits and decimals, whatever its size.

    >>> [significant(value) for value in (0.00012345, 4.0551, 32582.4, 788_291_578_812, 0)]
    ['0.0001234', '4.055', '32,582', '788,291,578,812', '0']
    >>> significant(1.5e-9), significant(474.7, decimals=2)
    ('1.500e-09', '474.70')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.{decimals}f}"
    exponent = math.floor(math.log10(abs(value)))
    if not -6 < exponent < 15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(decimals, digits - 1 - exponent)}f}"


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


def say(text: str) -> None:
    """Write a line to stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
