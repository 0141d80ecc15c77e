"""Real bugs: faults that users of training libraries reported, written anew behind the contract.

`bugs.toml` is the frozen list, README.md the rule by which it was made. Each entry has a faulty
and a fixed behaviour in `shown/CHAPTER.py`, written here:

    @faulty("verl-7493")
    class ShardAxisOfOne(PlainFsdp):
        '''Docstring: what goes wrong, and the link.'''

The fixed twin is the class that the faulty one derives from, unless `@fixed(ID)` names another.
They are no near-misses: they are in none of the lists, families and signatures of
`spec_tests/museum`.

    python -m spec_tests --impl impostor:reality.verl-7493
    python -m spec_tests --impl impostor:reality.verl-7493-fixed
    python -m spec_tests reality [--only ID]       judge all, write RESULTS.md
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spec_tests.museum.card import Impostor

FOLDER = Path(__file__).parent
PREFIX = "reality."
REJECTED = ("failed", "died", "hang")
"""Every way in which a clause may reject what a user reported as a silent wrong result."""

Kind = TypeVar("Kind", bound=type)

_FAULTY: dict[str, type] = {}
_FIXED: dict[str, type] = {}


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
    known: bool = False
    also: tuple[str, ...] = ()
    left_out: str = ""


@functools.cache
def bugs() -> dict[str, Bug]:
    """Every entry by its id, in the order of the list."""
    listed = tomllib.loads((FOLDER / "bugs.toml").read_text(encoding="utf-8"))["bug"]
    found = []
    for each in listed:
        lists: dict[str, Any] = {k: tuple(v) for k, v in each.items() if isinstance(v, list)}
        found.append(Bug(**{**each, **lists}))
    return {bug.id: bug for bug in found}


def faulty(id: str) -> Callable[[Kind], Kind]:
    """Register the decorated class as the faulty behaviour of that entry."""
    return _register(id, _FAULTY)


def fixed(id: str) -> Callable[[Kind], Kind]:
    """Register the class as the fixed behaviour, where that is not the faulty one's base."""
    return _register(id, _FIXED)


def _register(id: str, register: dict[str, type]) -> Callable[[Kind], Kind]:
    def add(code: Kind) -> Kind:
        if id not in bugs() or id in register:
            raise ValueError(f"{id}: expected an entry of bugs.toml, and one class for each")
        register[id] = code
        return code

    return add


@functools.cache
def implemented() -> dict[str, tuple[type, type]]:
    """The faulty and the fixed class of every entry that has them, in the order of the list."""
    from spec_tests.museum.reality import shown as folder

    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(module.name)
    return {
        id: (_FAULTY[id], _FIXED.get(id, _FAULTY[id].__bases__[0]))
        for id in bugs()
        if id in _FAULTY
    }


def cards(id: str) -> tuple[Impostor, Impostor]:
    """The faulty and the fixed behaviour as the machinery of the impostors takes them."""
    bug = bugs()[id]
    wrong, right = implemented()[id]
    expected = bug.expected or ("unknown",)
    return (
        Impostor(PREFIX + id, bug.what, bug.link, "", expected, REJECTED, wrong),
        Impostor(f"{PREFIX}{id}-fixed", f"Without: {bug.what}", bug.link, "", (), code=right),
    )


def find(words: str) -> Impostor:
    """The behaviour of that name, `reality.ID` or `reality.ID-fixed`.

    Raises:
        ValueError: there is none.
    """
    id = words.removeprefix(PREFIX)
    bare = id.removesuffix("-fixed")
    if bare not in implemented():
        raise ValueError(f"no real bug {words!r}; python -m spec_tests reality --list names them")
    wrong, right = cards(bare)
    return wrong if bare == id else right
