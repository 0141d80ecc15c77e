"""Golden files: rendered text that is compared whole with a file in `goldens/`.

After an intended change, write them anew and read the difference before you commit it:

    WRITE_GOLDENS=1 python -m pytest spec_tests/tests/rig -k as_it_was_kept
    git diff spec_tests/tests/rig/goldens
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "goldens"


def check(name: str, text: str) -> None:
    """Assert that `text` is what the golden file `name` holds; write the file if asked to.

    White space at the ends of lines does not count, since editors remove it.
    """
    path = FOLDER / name
    lines = [line.rstrip() for line in text.splitlines()]
    if os.environ.get("WRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    assert lines == kept.splitlines(), f"see the head of {Path(__file__).name}"
