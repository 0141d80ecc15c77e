"""The card of an impostor: what it does wrong, where that was seen, which clauses must reject it.

An impostor is one class. Its base is right code with a method for each decision, the class
overrides one of them, and the docstring is the story:

    @near_miss("ddp.sum-for-mean", rejected_by="ddp.gradients.mean")
    class SumForMean(PlainDdp):
        '''Sums gradients and never divides.

        From: the commonest fault of all.
        Unseen: Adam's curves are the same.
        '''

        def scale(self, flat):
            return flat.clone()

The first paragraph says what it does, "From:" the real bug or how one comes to write it, "Unseen:"
why usual tests miss it; further paragraphs are notes. The base's class method `functions` says how
its subclasses become functions of the contract. `Patched` changes lines of the reference, and
`FreeStanding` offers its static methods. Decorating a class adds its card to `CATALOGUE`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

Functions = dict[str, Any]
Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Impostor:
    """A deliberate near-miss, or (with no `rejected_by`) a benign variant.

    Attributes:
        id: dotted words; `--impl impostor:ID` judges it.
        does: what it does wrong, in one sentence.
        seen: the real bug it comes from, or how one comes to write it.
        unseen: why usual tests miss it.
        rejected_by: ids of the clauses that must each reject it.
        outcomes: how a rejection may show; most are plain failures.
        code: the decorated class; None for the control that changes nothing.
        also: of a benign variant, patterns of clauses of level `production` that it passes, too.
    """

    id: str
    does: str
    seen: str
    unseen: str
    rejected_by: tuple[str, ...]
    outcomes: tuple[str, ...] = ("failed",)
    code: type | None = None
    also: tuple[str, ...] = ()

    @property
    def functions(self) -> Callable[[], Functions] | None:
        """Makes the contract functions that replace those of the implementation below."""
        return getattr(self.code, "functions", None)

    @property
    def patches(self) -> tuple[tuple[str, str, str], ...]:
        """Source patches of the reference, see `patching`."""
        if self.code is None or not issubclass(self.code, Patched):
            return ()
        return ((self.code.module, self.code.find, self.code.replace),)

    @property
    def requires(self) -> str:
        """The module without which there is nothing to judge, such as "triton", or ""."""
        return getattr(self.code, "requires", "")

    @property
    def alone(self) -> bool:
        """True if it only computes, so that clauses for one rank need no process (`alone`)."""
        return getattr(self.code, "alone", False)

    @property
    def is_here(self) -> bool:
        """True if this machine has what it requires."""
        return not self.requires or find_spec(self.requires) is not None

    @property
    def is_benign(self) -> bool:
        """True for correct but unusual code, which nothing may reject."""
        return not self.rejected_by


class Patched:
    """Base of near-misses of the reference itself, in whose `module` `find` becomes `replace`."""

    module: ClassVar[str]
    find: ClassVar[str]
    replace: ClassVar[str]


class FreeStanding:
    """Base of impostors whose static methods are functions of the contract, by their names."""

    @classmethod
    def functions(cls) -> Functions:
        """Return the public methods of the class by name."""
        names = [name for name in dir(cls) if not name.startswith("_") and name != "functions"]
        return {name: getattr(cls, name) for name in names}


CATALOGUE: dict[str, Impostor] = {}
"""Every impostor by its id, in the order in which their modules are imported."""


def near_miss(
    id: str, *, rejected_by: str | tuple[str, ...], outcomes: tuple[str, ...] = ("failed",)
) -> Callable[[Kind], Kind]:
    """Register the decorated class as a near-miss that each of these clauses must reject.

    Raises:
        ValueError: when the class is decorated, if its docstring lacks a part of the story.
    """
    clauses = (rejected_by,) if isinstance(rejected_by, str) else rejected_by

    def register(code: Kind) -> Kind:
        does, *story = _paragraphs(code)
        found = re.search(r"^From: (.+)^Unseen: (.+)", "\n\n".join(story[:1]), re.S | re.M)
        if not clauses or found is None:
            raise ValueError(
                f"{id}: expected clauses in rejected_by, and a docstring of {code.__name__} with "
                'a sentence, a blank line, a line "From: ..." and a line "Unseen: ..."'
            )
        seen, unseen = map(_one_line, found.groups())
        return _add(Impostor(id, does, seen, unseen, clauses, outcomes, code), code)

    return register


def benign(id: str, *, also: tuple[str, ...] = ()) -> Callable[[Kind], Kind]:
    """Register the decorated class as right but unusual code, which no clause may reject.

    Of level `production` those whose ids match `also`: the bases do not promise all of it.
    """
    return lambda code: _add(
        Impostor(id, _paragraphs(code)[0], "", "", (), code=code, also=also), code
    )


def _add(card: Impostor, code: Kind) -> Kind:
    if card.id in CATALOGUE:
        raise ValueError(f"{card.id}: expected an id of its own, got that of another impostor")
    CATALOGUE[card.id] = card
    return code


def _paragraphs(code: type) -> list[str]:
    """The docstring of the class itself, its first paragraph on one line."""
    words = code.__dict__.get("__doc__")
    if not words:
        raise ValueError(f"{code.__name__}: expected a docstring that says what it does, got none")
    first, *rest = inspect.cleandoc(words).split("\n\n")
    return [_one_line(first), *rest]


def _one_line(words: str) -> str:
    return " ".join(words.split())
