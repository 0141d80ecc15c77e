"""Situations that once told a fault: `seeds.toml`, tried before anything is drawn.

    [[seed]]
    judges = "fully_shard"
    line = "two: keep True, backward 0, step, evaluate 1"
    source = "weights kept after a backward, of which one optimizer of two was noticed"
    size = 3                  # optional: the number of ranks, 2 if left out
    level = "production"      # optional, "correct" if left out
    formerly = "fsdp.accumulation.nothing-to-all-reduce"   # optional: the clause that it was

A crossing of which no user would look for a sentence in the contract is a line here, and no clause.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from spec_tests.programs import law
from spec_tests.rig.outcomes import LEVELS

FILE = Path(__file__).parent / "seeds.toml"


@dataclass(frozen=True)
class Seed:
    """A situation of a function, and what it once told.

    Attributes:
        formerly: the id of the clause that it was.
    """

    judges: str
    line: str
    source: str
    size: int = 2
    level: str = "correct"
    formerly: str = ""


@cache
def load(file: Path = FILE) -> tuple[Seed, ...]:
    """Return the situations of a file.

    Raises:
        ValueError: An entry has an unknown key, or its line is not legal for its function and size.
        OSError: The file cannot be read.
    """
    found = []
    for number, entry in enumerate(tomllib.loads(file.read_text("utf-8")).get("seed", []), 1):
        try:
            seed = Seed(**entry)
            law.legal(seed.line, seed.judges, seed.size)
            if seed.level not in LEVELS:
                raise ValueError(f"expected a level of {', '.join(LEVELS)}, got {seed.level!r}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, entry {number}: {error}") from error
        found.append(seed)
    return tuple(found)


def formerly_clauses(found: Iterable[Seed]) -> dict[str, str]:
    """Return the id of each clause that became a situation, and that situation as Markdown."""
    return {
        seed.formerly: f"`{seed.line}` of `{seed.judges}` on {seed.size} ranks; {seed.source}"
        for seed in found
        if seed.formerly
    }


def append(file: Path, seed: Seed) -> None:
    """Write a situation at the end of a file, which is made if there is none."""
    usual = asdict(Seed("", "", ""))
    entry = {key: value for key, value in asdict(seed).items() if value != usual[key]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n".join(["", "[[seed]]", *lines, ""]))
