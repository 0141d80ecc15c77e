"""The promises of the contract, read from its docstrings.

A docstring lists promises by level, one per line, and then the conditions that may be refused:

    Level `correct`:
        fresh-weights: After an update, the next forward uses the new weights.

    May be refused:
        tied: A parameter that has two names.

Under such a condition an implementation keeps all promises of the function, or refuses it with an
error. A condition has the name of the promise that concerns it, if there is one.

A clause names what it judges at the front of its source, with the function, as in
`source="contract: fully_shard/fresh-weights, fully_shard/tied; ..."`, or without it, as in
`source="contract: fresh-weights, tied; ..."`, if it judges or needs that function.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spec_tests.contract import FUNCTIONS
from spec_tests.contract.trainer import Trainer

_SECTION = re.compile(r"(?:Level `(\w+)`|(May be refused)|(?:Args|Returns|Raises)):")
_ITEM = re.compile(r" {4}([a-z0-9]+(?:-[a-z0-9]+)*): (.+\.)")
_NAMED = re.compile(r"contract: ([^;]*)")
_BASE = re.compile(r"As `(\w+)`")


@dataclass(frozen=True)
class Promise:
    """One line of a docstring.

    Attributes:
        function: the function of the contract, or `Trainer.method`.
        name: unique in the function.
        level: who owes it; `correct` for a condition without a promise of that name.
        sentence: what is promised; "" for such a condition.
        refusable: the condition that may be refused; "" if none may.
    """

    function: str
    name: str
    level: str
    sentence: str
    refusable: str = ""

    @property
    def id(self) -> str:
        """How a clause names it."""
        return f"{self.function}/{self.name}"


def _lines(function: Any) -> Iterator[tuple[str, str, str]]:
    """Level ("" for what may be refused), name and text of each line of a docstring's lists."""
    level: str | None = None
    for line in (inspect.getdoc(function) or "").splitlines():
        if section := _SECTION.fullmatch(line):
            level = section[1] or ("" if section[2] else None)
        elif level is not None and line:
            item = _ITEM.fullmatch(line)
            if item is None:
                raise ValueError(f"{function.__qualname__}: expected 'name: Text.', got {line!r}")
            yield level, item[1], item[2]


def read(function: Any) -> dict[str, Promise]:
    """Return the promises and conditions that a docstring lists, by name.

    Raises:
        ValueError: for a line that is none, or a name that is there twice.
    """
    owner = function.__qualname__
    found: dict[str, Promise] = {}
    for level, name, text in _lines(function):
        earlier = found.get(name, Promise(owner, name, "correct", ""))
        if earlier.refusable or (level and name in found):
            raise ValueError(f"{owner}: {name!r} is there twice")
        made = Promise(owner, name, level, text) if level else replace(earlier, refusable=text)
        found[name] = made
    return found


@functools.cache
def promises_of(name: str) -> tuple[Promise, ...]:
    """Return all that a function of the contract promises, with what it has "As" another one."""
    function = FUNCTIONS[name]
    base = _BASE.match(inspect.getdoc(function) or "")
    return (*(promises_of(base[1]) if base else ()), *read(function).values())


_METHODS = [method for method in vars(Trainer).values() if inspect.isfunction(method)]
PROMISES: dict[str, Promise] = {
    promise.id: promise
    for function in (*FUNCTIONS.values(), *_METHODS)
    for promise in read(function).values()
}
"""Every promise and every condition that may be refused, by id, in the order of the contract."""


def qualified(source: str, functions: Iterable[str]) -> str:
    """Return the source of a clause with the function before each promise that it names.

    Args:
        functions: those that the clause judges or needs. A name without a function is the promise
            of that name of each of them.

    Raises:
        ValueError: for a name that is no promise.
    """
    found = _NAMED.match(source)
    if found is None:
        return source
    own = {p.id: p for function in functions for p in promises_of(function)}
    ids: list[str] = []
    for name in found[1].split(", "):
        meant = [name] if name in PROMISES else [id for id, p in own.items() if p.name == name]
        if not meant:
            raise ValueError(f"{name!r} is no promise of the contract")
        ids += meant
    return f"contract: {', '.join(ids)}" + source[found.end(1) :]


def named_in(source: str) -> list[str]:
    """Return the ids of the promises that a clause's source names, which `qualified` returned."""
    found = _NAMED.match(source)
    return found[1].split(", ") if found else []
