"""Situations that an implementation declares to do otherwise, in the TOML file of its deviations.

    [[situation]]
    judges = "fully_shard"
    pattern = '(evaluate|infer) \\d+, step'   # searched in the line; nothing drawn may match it
    shows = "evaluate 0, step, evaluate 1"   # a line that matches and fails
    size = 2                                 # of the world in which it fails; 2 if left out
    reason = "an evaluation leaves the root unsharded, and a step does not reshard it"
    link = "https://..."                     # optional

A deviation of one clause excuses one case. In drawn programs the same deviation meets everything
else, so a generator that does not avoid it finds nothing but this deviation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spec_tests.rig.judge.expectations import documents
from spec_tests.rig.target import Target

_KEYS = {"judges", "pattern", "shows", "size", "reason", "link"}


@dataclass(frozen=True)
class Declared:
    """One entry."""

    judges: str
    pattern: str
    shows: str
    reason: str
    link: str = ""
    size: int = 2

    def speaks_of(self, line: str) -> bool:
        """Return whether the entry's pattern occurs in a situation."""
        return re.search(self.pattern, line) is not None


@cache
def load(file: Path) -> tuple[Declared, ...]:
    """Return the entries of a file of deviations, and of the file that it inherits.

    Raises:
        ValueError: An entry has an unknown key or lacks one, its pattern is no regular expression,
            or its `shows` does not match its pattern.
    """
    return tuple(
        _parsed(entry, where)
        for where, document in documents(file)
        for entry in document.get("situation", [])
    )


def _parsed(entry: dict[str, Any], file: Path) -> Declared:
    try:
        declared = Declared(**entry)
        fits = declared.speaks_of(declared.shows)
    except (TypeError, re.error) as error:
        raise ValueError(f"{file}, [[situation]]: {error}; keys: {sorted(_KEYS)}") from error
    if not fits:
        raise ValueError(
            f"{file}, [[situation]]: expected `shows` to match its pattern {declared.pattern!r}, "
            f"got {declared.shows!r}"
        )
    return declared


def of(target: Target | None) -> tuple[Declared, ...]:
    """Return the entries that are declared beside an implementation."""
    file = target.expectations if target is not None else None
    return load(file) if file is not None and file.is_file() else ()


def avoided(target: Target | None, subject: str) -> Callable[[str], bool]:
    """Return whether a line is one that an implementation declares of a function, as a function."""
    entries = [entry for entry in of(target) if entry.judges == subject]
    return lambda line: any(entry.speaks_of(line) for entry in entries)
