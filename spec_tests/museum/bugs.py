"""Real bugs: faults that users of training libraries reported, and the cards that show them.

`reality/bugs.toml` is the frozen list, `reality/README.md` the rule by which it was made. An entry
names the near-miss that shows its fault. Where no clause rejects it, that is a benign variant.

    python -m spec_tests --impl impostor:reality.verl-7493
    python -m spec_tests impostors --only 'reality.*'      all of them, by the clauses they name
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_tests.museum.card import CATALOGUE, Impostor

FOLDER = Path(__file__).with_name("reality")
PREFIX = "reality."


@dataclass(frozen=True)
class Bug:
    """One entry of the list.

    Attributes:
        id: project and number of the thread.
        link: the thread.
        what: the fault in one sentence.
        chapter: of the clauses that judge the function which it concerns.
        expected: ids of the clauses that a reading of the thread suggests.
        query: number of the query that returned it, or "named" by an issue of this project.
        card: id of the impostor that shows it; "" if it is left out.
        known: whether the suite cited the thread before the list was made.
        also: links of threads about the same fault.
        left_out: why it cannot be shown behind the contract; "" if it can.
    """

    id: str
    link: str
    what: str
    chapter: str
    expected: tuple[str, ...]
    query: int | str
    card: str = ""
    known: bool = False
    also: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def repository(self) -> str:
        """Owner and name of the repository of the thread."""
        return "/".join(self.link.split("/")[3:5])


@functools.cache
def bugs() -> dict[str, Bug]:
    """Return every entry by its id, in the order of the list."""
    listed = tomllib.loads((FOLDER / "bugs.toml").read_text(encoding="utf-8"))["bug"]
    found = []
    for each in listed:
        lists: dict[str, Any] = {k: tuple(v) for k, v in each.items() if isinstance(v, list)}
        found.append(Bug(**{**each, **lists}))
    return {bug.id: bug for bug in found}


def cards() -> dict[str, Impostor]:
    """Return the cards of the bugs that are shown, under the names `reality.ID`."""
    shown = {f"{PREFIX}{bug.id}": bug.card for bug in bugs().values() if bug.card}
    return {name: replace(CATALOGUE[card], id=name) for name, card in shown.items()}
