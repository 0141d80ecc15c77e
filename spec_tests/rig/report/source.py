"""The line of the judged code that a message leads to, with the lines around it.

It is read when the log is written: when a page is opened, the file may have changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_tests.rig.report.causes import innermost

_AROUND = 2
_MAX_COLUMNS = 120


def source_of(message: str) -> dict[str, Any]:
    """Return the lines around the innermost own line of a traceback or stack in a message.

    Returns:
        {"file": its name, "line": 12, "first": 10, "lines": five at most}; nothing where the
        message has no such line, or it cannot be read.
    """
    file, line = innermost(message)
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = max(1, line - _AROUND)
    near = [each.rstrip() for each in lines[first - 1 : line + _AROUND]]
    shown = [s if len(s) <= _MAX_COLUMNS else f"{s[: _MAX_COLUMNS - 1]}…" for s in near]
    if line > len(lines):
        return {}
    return {"file": path.name, "line": line, "first": first, "lines": shown}
