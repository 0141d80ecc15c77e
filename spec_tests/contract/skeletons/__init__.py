"""Learning mode: files to begin with, each a part of the contract with the algorithm in steps.

    python -m spec_tests new ddp DIR      writes DIR/ddp.py

A skeleton loads, offers its functions, and fails at the first step that is still to be done, with
the words of that step. Its docstring lists the tasks in the order in which they build on each
other, each with the clauses that say when it is done; `tasks` reads that list.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUBJECTS = ("ddp", "zero1", "fsdp", "attention", "loader", "trainer")
"""In the order of a course: each one has the file of that name here."""

_PLACE = "THIS_FILE"
_TASK = re.compile(r"^    (\d)\. .*?\n((?:        .*\n)+)", re.MULTILINE)


def text_of(subject: str, place: Path) -> str:
    """The skeleton as it would stand at `place`."""
    return (FOLDER / f"{subject}.py").read_text(encoding="utf-8").replace(_PLACE, str(place))


def is_one(place: Path | None) -> bool:
    """Whether the file at `place` began as a skeleton: it still has the error of what is to do."""
    if place is None or not place.is_file():
        return False
    return "class ToDo(Exception):" in place.read_text(encoding="utf-8", errors="replace")


def tasks(text: str) -> list[list[str]]:
    """The patterns of clauses of each task, in the order of a skeleton's docstring."""
    return [re.findall(r"--clause '([^']+)'", lines) for _, lines in _TASK.findall(text)]
