"""The card of an impostor: what it does wrong, where that was seen, which clauses must reject it.

An impostor is right code with one thing changed. Where that is a line or a few, of
`spec_tests.plain` or of the reference, the impostor is a difference:

    DDP = Source("spec_tests.plain.ddp")

    DDP.near_miss(
        "ddp.first-rank-of-world",
        "ddp.group.starts-from-its-first-rank",
        "- dist.broadcast(whole, group=self.group, group_src=0)",
        "+ dist.broadcast(whole, src=0)",
        does="Broadcasts over the world in place of the group.",
        seen="`src=0` and no group in the constructor.",
        unseen="Tests have one group.",
    )

Where it is a method or more, the impostor is a class that overrides a method of its base, and the
docstring is the story:

    @near_miss("ddp.sends-frozen", rejected_by="ddp.programs.any-production-situation")
    class SendsFrozen(PlainDdp):
        '''Sends zeros for frozen parameters.

        From: Flattening `p.grad` of all parameters.
        Unseen: The result is thrown away; fine-tuning pays for the whole model.
        '''

        def launch(self, bucket):
            ...

The first paragraph says what it does, "From:" the real bug or how one comes to write it, "Unseen:"
why usual tests miss it; further paragraphs are notes. The base's class method `functions` says how
its subclasses become functions of the contract; a base that is functions has nothing to override,
and takes changed lines alone. Each card is added to `CATALOGUE`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from spec_tests import plain
from spec_tests.museum.patching import Patch, patched_class, patches_of
from spec_tests.plain.fully_shard import PlainFsdp

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
        code: the decorated class; of a patch of `spec_tests.plain` the class that it changes; None
            for a patch of another module, and for the control that changes nothing.
        also: of a benign variant, patterns of clauses of level `production` that it passes, too.
        patches: the changed lines, see `patching`.
        requires: the module without which there is nothing to judge, such as "triton", or "".
    """

    id: str
    does: str
    seen: str
    unseen: str
    rejected_by: tuple[str, ...]
    outcomes: tuple[str, ...] = ("failed",)
    code: type | None = None
    also: tuple[str, ...] = ()
    patches: tuple[Patch, ...] = ()
    requires: str = ""

    @property
    def chapter(self) -> str:
        """The chapter whose functions it brings."""
        return self.id.partition(".")[0]

    @property
    def functions(self) -> Callable[[], Functions] | None:
        """Makes the contract functions that replace those of the implementation below."""
        code = self.code
        if code is not None and self.patches:
            return lambda: patched_class(code, self.patches).functions()
        return getattr(code, "functions", None)

    @property
    def brings(self) -> set[str]:
        """The names of the contract functions that it replaces; none if it patches the reference.

        A patch changes no name, so that its base is asked, and nothing is imported anew.
        """
        functions: Callable[[], Functions] = getattr(self.code, "functions", dict)
        return {*functions()}

    @property
    def is_here(self) -> bool:
        """True if this machine has what it requires."""
        return not self.requires or find_spec(self.requires) is not None

    @property
    def is_benign(self) -> bool:
        """True for correct but unusual code, which nothing may reject."""
        return not self.rejected_by


CATALOGUE: dict[str, Impostor] = {}
"""Every impostor by its id, in the order in which their modules are imported."""


BASES = {base.__module__: base for base in plain.BASES} | {"spec_tests.plain.fsdp": PlainFsdp}
"""The class of `spec_tests.plain` that offers the functions of a module there."""


class Source:
    """A module that near-misses change.

    A difference is lines that begin with "- " (goes), "+ " (comes) or "  " (stays); how far they
    are indented in the module is not said. A line "..." begins another place of the same module,
    "@ MODULE" one of another module.
    Without a difference the near-miss is the base itself, which lacks what the clauses ask.

    Args:
        module: a module of `spec_tests.plain`, or one of the implementation below.
        base: the class of `spec_tests.plain` whose functions are offered; by default the one in
            `BASES`, and none for a module of the implementation below.
        requires: see `Impostor`.
    """

    def __init__(self, module: str, base: type | None = None, requires: str = "") -> None:
        self.module, self.base, self.requires = module, base or BASES.get(module), requires

    def near_miss(
        self,
        id: str,
        rejected_by: str | tuple[str, ...],
        *difference: str,
        does: str,
        seen: str,
        unseen: str,
        outcomes: tuple[str, ...] = ("failed",),
    ) -> None:
        """Register the changed module as a near-miss that each of these clauses must reject."""
        clauses = (rejected_by,) if isinstance(rejected_by, str) else rejected_by
        self._add(Impostor(id, does, seen, unseen, clauses, outcomes), difference)

    def benign(self, id: str, *difference: str, does: str, also: tuple[str, ...] = ()) -> None:
        """Register the changed module as right but unusual code, see `benign`."""
        self._add(Impostor(id, does, "", "", (), also=also), difference)

    def _add(self, card: Impostor, difference: Sequence[str]) -> None:
        patches = patches_of(self.module, difference)
        _add(replace(card, code=self.base, patches=patches, requires=self.requires))


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
        _add(Impostor(id, does, seen, unseen, clauses, outcomes, code))
        return code

    return register


def benign(id: str, *, also: tuple[str, ...] = ()) -> Callable[[Kind], Kind]:
    """Register the decorated class as right but unusual code, which no clause may reject.

    Of level `production` those whose ids match `also`: the bases do not promise all of it.
    """

    def register(code: Kind) -> Kind:
        _add(Impostor(id, _paragraphs(code)[0], "", "", (), code=code, also=also))
        return code

    return register


def _add(card: Impostor) -> None:
    if card.id in CATALOGUE:
        raise ValueError(f"{card.id}: expected an id of its own, got that of another impostor")
    CATALOGUE[card.id] = card


def _paragraphs(code: type) -> list[str]:
    """The docstring of the class itself, its first paragraph on one line."""
    words = code.__dict__.get("__doc__")
    if not words:
        raise ValueError(f"{code.__name__}: expected a docstring that says what it does, got none")
    first, *rest = inspect.cleandoc(words).split("\n\n")
    return [_one_line(first), *rest]


def _one_line(words: str) -> str:
    return " ".join(words.split())
