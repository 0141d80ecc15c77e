"""Faults of PyTorch and of libraries, in `NAME.toml` beside this file, a table for each:

    [fsdp_lifecycle_fresh_after_step_by_hand]
    what = "FSDP2 computes with stale weights after a step, where ..."
    got = "the output of the weights before the step"
    clause = "fsdp.lifecycle.fresh-after-step"     # or why there is none
    case = "*-by-hand*"                            # of the deviation that declares it
    checked = "torch 2.13.0, 2026-11-23"
    judges = "fully_shard"                         # a situation of the world model, on `ranks` (2)
    situation = "mlp root: unshard now, step, evaluate 1"

What is no situation has `expected` in words and a `body` of a few lines, which returns what is got:
`returns` is what it must return, on each of `ranks` ranks if there is that key; or `ends`, how it
may begin or `raised`, for a fault that hangs or ends a process. `known` is where it was reported,
otherwise the link of the deviation says; `environment` is set before a library is imported.
`python -m spec_tests repro --finding NAME DIR` writes the script.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from spec_tests.rig.judge import expectations
from spec_tests.rig.target import ADAPTERS

FOLDER = Path(__file__).resolve().parent
_KEYS = {"what", "expected", "got", "clause", "case", "checked", "known", "judges", "situation"}
_KEYS |= {"ranks", "returns", "ends", "environment", "body"}


@dataclass(frozen=True)
class Finding:
    """A fault of PyTorch or of a library: `owner` is the implementation that has it."""

    name: str
    owner: str
    entry: Mapping[str, Any]

    @property
    def case(self) -> str:
        """Return which cases of its clause the deviation names."""
        return self.entry.get("case", "*")

    @property
    def clauses(self) -> set[str]:
        """Return the ids of the clauses that fail by it; none where no clause is about it."""
        return set(re.findall(r"[a-z0-9]+(?:\.[a-z0-9-]+)+", self.entry["clause"]))

    def deviation(self) -> expectations.Deviation | None:
        """Return the entry that declares it, if there is one."""
        entries = expectations.load(ADAPTERS / f"{self.owner}.toml")
        return next((e for e in entries if e.clause in self.clauses and e.case == self.case), None)


def of(owner: str) -> list[Finding]:
    """Return the findings of an implementation.

    Raises:
        ValueError: an entry has a key that is not known.
    """
    file = FOLDER / f"{owner}.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, entry in tables.items():
        if entry.keys() - _KEYS:
            raise ValueError(f"{file}, {name}: unknown keys {sorted(entry.keys() - _KEYS)}")
    return [Finding(name, owner, entry) for name, entry in tables.items()]


def named(pattern: str) -> list[Finding]:
    """Return the findings whose names match a pattern.

    Raises:
        ValueError: There is none.
    """
    every = [each for path in sorted(FOLDER.glob("*.toml")) for each in of(path.stem)]
    if found := [each for each in every if fnmatch(each.name, pattern)]:
        return found
    near = ", ".join(difflib.get_close_matches(pattern, [e.name for e in every], 3, 0.4)) or "none"
    to_list = f"To list all: grep -h '^\\[' {FOLDER}/*.toml"
    raise ValueError(f"expected the name of a finding, got {pattern!r}; near it: {near}. {to_list}")
