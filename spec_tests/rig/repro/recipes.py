"""Which script shows which clause: the situation that a template is filled with.

recipes.toml holds the situations. One of `templates/model.txt` is written as
"model; program; flags; options", for example "layers; backward 0, step; full": a model and verbs of
that file, and what is compared: gradients unless the flags say parameters, state, full (weights) or
nothing (only what the program itself saw). Other flags: differ (each rank builds other weights),
local (nothing is reduced), group (the first rank is left out), may-raise (an error is as good), G
(gradients, or the weights after a step where gradients are in a form of the wrapper's own). The
other templates have defaults, of which a clause names what it changes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CALLS = {
    "backward": r"\bbackward\((\d|micro)",
    "finish": r"finish\(",
    "optimizer": r"optimizer\.",
    "quiet": r"quiet\(",
    "seen": r"seen\[",
    "loss": r"loss\(",
}
"""Lines of model.txt that a program needs, and by what it is seen to need them."""

OF_FULLY_SHARD = ("unreduced", "keep", "unshard", "reshard")
"""What a situation asks of `fully_shard` that `fsdp` does not have."""


@dataclass(frozen=True)
class Recipe:
    """One script before it is written.

    Attributes:
        frame, body: names of the templates.
        tags: which of the template's marked lines are kept.
        settings: names and source of their values; functions and classes stand alone.
        program: source that takes the place of PROGRAM.
        subject: the contract's function that is called.
    """

    frame: str
    body: str
    tags: frozenset[str]
    settings: Mapping[str, str]
    program: str
    subject: str


def recipes_of(clause: str, subject: str, ranks: int) -> Iterator[Recipe]:
    """Yield what may show a clause, the simplest first; nothing where no script is small."""
    table = _table()
    chapter, _, rest = clause.partition(".")
    for line in table["model"].get(chapter, {}).get(rest, ()):
        if subject != "fsdp" or not any(word in line for word in OF_FULLY_SHARD):
            yield _of_model(table, line, subject, ranks)
    of_chapter = table["settings"].get(chapter, {"changes": {}})
    if rest in of_chapter["changes"]:
        yield _of_settings(chapter, of_chapter, rest, subject, ranks)


def has_recipe(clause: str) -> bool:
    """Whether there is a template for the situation of a clause."""
    return any(True for _ in recipes_of(clause, "", 2))


def _table() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "recipes.toml").read_text(encoding="utf-8"))


def _of_settings(
    chapter: str, of_chapter: Mapping[str, Any], rest: str, subject: str, ranks: int
) -> Recipe:
    changes = of_chapter["changes"][rest]
    is_on_ranks = chapter in ("zero1", "clip")
    settings = {"RANKS": str(max(ranks, 2))} if is_on_ranks else {}
    settings |= of_chapter["defaults"] | changes
    tags = {*re.findall(r"\w+", settings.get("PROGRAM", "")), *map(str.lower, changes)}
    tags |= {"sharded"} if changes.get("SHARDED") != "False" else set()
    tags -= {"sharded"} if changes.get("SHARDED") == "False" else set()
    tags |= {"must-answer"}
    frame, body = "ranks" if is_on_ranks else "one", "loader" if chapter == "data" else chapter
    return Recipe(frame, body, frozenset(tags), settings, "", subject)


def _of_model(table: Mapping[str, Any], line: str, subject: str, ranks: int) -> Recipe:
    model, calls, flags, options, *_ = [part.strip() for part in f"{line};;;".split(";")]
    words = {*flags.split()}
    if "G" in words and subject == "fsdp":
        words, calls = words | {"full"}, f"{calls}, step"
    code = []
    for call in filter(None, (each.strip() for each in calls.split(","))):
        verb, _, micro = call.partition(" ")
        code.append(re.sub(r"\bN\b", micro or "0", table["verbs"][verb].strip()))
    program = "\n".join(code)
    compared = words & {"full", "parameters", "state", "nothing"} or {"gradients"}
    tags = {subject, *words, *compared, "differ" if "differ" in words else "alike"}
    tags |= {tag for tag, pattern in CALLS.items() if re.search(pattern, program)}
    tags |= {"loss"} if "backward" in tags else set()
    tags |= {"ranks"} if "local" not in words else set()
    tags |= {"must-answer"} if "may-raise" not in words else set()
    if "nothing" not in words:
        tags |= {"both-of-them" if "seen" in tags else "unseen"}
    if subject == "ddp_bucketed":
        options = "bucket_size_mb=1e-4"
    options += ", process_group=group" if "group" in words else ""
    size = max(ranks, 3) if "group" in words else ranks
    settings = {
        "RANKS, GROUP": f"{size}, {[*range('group' in words, size)]}",
        "Model": table["models"][model].strip(),
        "@OPTIONS": f", {options.removeprefix(', ')}" if options else "",
    }
    return Recipe("ranks", "model", frozenset(tags), settings, program, subject)
