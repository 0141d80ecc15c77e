"""Which script shows which clause, the simplest first.

Of models and sharded optimizers it is that of a situation (`situations.py`): the failed case's own,
or those that verbs.toml names for a clause that is none. The templates of clipping, attention and
loaders have defaults, of which a clause names in recipes.toml what it changes.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

from spec_tests.programs.repro import situations
from spec_tests.programs.repro.script import Recipe

FILE = Path(__file__).with_suffix(".toml")


def recipes_of(clause: str, subject: str, ranks: int, situation: str = "") -> Iterator[Recipe]:
    """Yield what may show a clause.

    Args:
        situation: of the case that failed, if it has one.
    """
    for line in filter(None, (situation, *situations.lines_of(clause))):
        with contextlib.suppress(ValueError):  # a word that no script can build
            yield situations.recipe_of(line, subject, ranks)
    chapter, _, rest = clause.partition(".")
    of_chapter = tomllib.loads(FILE.read_text(encoding="utf-8")).get(chapter, {"changes": {}})
    if rest in of_chapter["changes"]:
        changes = of_chapter["changes"][rest]
        settings = {"RANKS": str(max(ranks, 2))} if chapter == "clip" else {}
        settings |= of_chapter["defaults"] | changes
        tags = {*map(str.lower, changes), "must-answer", "file"}
        if changes.get("SHARDED") != "False":
            tags.add("sharded")
        frame = "ranks" if chapter == "clip" else "one"
        values = {"function": subject}
        yield Recipe(frame, chapter, frozenset(tags), settings, values=values)
