"""What a clause is, and the register of all of them.

    clause = clauses(judges=("ddp", "ddp_bucketed"), level="correct", worlds=(2, 3, 4))

    @clause("ddp.gradients.mean", source="contract: mean-gradient; Li et al. 2020, section 3.2.1")
    def test_every_rank_holds_the_mean_gradient(world, subject):
        \"\"\"Every rank MUST hold the mean over ranks of the local gradients.

        Why it matters, what goes wrong in practice, what it does not promise.
        \"\"\"

The id is dotted lower-case words, `chapter.aspect.fact`; never a number, never reused. The first
line of the docstring *is* the norm: one sentence with one normative verb, readable in the ledger
without the code; the verb is the clause's strength. `judges` names contract functions that are each
judged separately (the case's `subject`); `needs` names further functions that must be offered.
`source` begins with the promises that the clause judges, see `spec_tests/contract/promises.py`.
`clauses` sets the defaults of a file, once, at its head. Levels and outcomes are described in
`spec_tests/rig/outcomes.py`.

A clause whose test is one call of a law is a row, of one situation or of several with their names:

    holds = rows(clause, same_as_alone)

    test_mean = holds(
        "ddp.gradients.mean",
        "Every rank MUST hold the mean over ranks of the local gradients.",
        # Why it matters, what goes wrong in practice, what it does not promise.
        {"odd": "ragged: backward 0", "tied": "tied: backward 0"},
        source="contract: mean-gradient; Li et al. 2020, section 3.2.1",
    )
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import pytest

from spec_tests.contract import FUNCTIONS, promises
from spec_tests.rig.outcomes import LEVELS, Strength

MUST, SHOULD, MAY = Strength.MUST, Strength.SHOULD, Strength.MAY

TELLING_SIZE = 3
"""Two ranks cannot tell a sum from a doubling, nor their number from a 2 in the code."""

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*){2,3}")
_MARK = "__clause__"
_Test = TypeVar("_Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Clause:
    """One norm and the test that observes it.

    Attributes:
        id: dotted words, stable for ever.
        sentence: the norm, first line of the docstring.
        strength, level: see the module docstring of `spec_tests.rig.outcomes`.
        judges: contract functions judged one at a time; empty if it needs none in particular.
        needs: contract functions that must be offered as well.
        source: the promises of the contract that it judges, then the page that says so.
        worlds: the world sizes at which it is judged.
        transports: where its observation is possible.
        no_impostor: why no near-miss can be built against it; "" where one exists.
    """

    id: str
    sentence: str
    strength: Strength
    level: str
    judges: tuple[str, ...]
    needs: tuple[str, ...]
    source: str
    worlds: tuple[int, ...]
    transports: tuple[str, ...]
    no_impostor: str
    test: Callable[..., Any]

    @property
    def chapter(self) -> str:
        """First word of the id."""
        return self.id.partition(".")[0]

    @property
    def promises(self) -> list[str]:
        """Ids of the promises of the contract that it judges."""
        return promises.named_in(self.source)

    @property
    def sizes(self) -> list[int]:
        """The world sizes in the order in which they are judged: what tells most comes first."""
        return sorted(self.worlds, key=lambda size: size != TELLING_SIZE)

    @property
    def where(self) -> str:
        """File and line of the test, relative to the repository."""
        code = inspect.unwrap(self.test).__code__
        root = Path(__file__).resolve().parents[2]
        return f"{Path(code.co_filename).relative_to(root).as_posix()}:{code.co_firstlineno}"

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether one of some patterns, such as `ddp.*`, is that of the id."""
        return any(fnmatchcase(self.id, pattern) for pattern in patterns)

    def transport_on(self, transport: str) -> str:
        """Return the transport to judge it on: `sim` if only that can observe it, else this one."""
        only = self.transports[0] if len(self.transports) == 1 else ""
        return "sim" if only == "sim" and transport == "gloo" else transport

    def _parameters(self) -> Iterator[tuple[str, list[Any], list[str]]]:
        """Name, values and ids of each parametrised argument."""
        for mark in getattr(self.test, "pytestmark", []):
            if mark.name == "parametrize":
                values = list(mark.args[1])
                yield mark.args[0], values, list(mark.kwargs.get("ids") or map(str, values))

    def label(self, case: Mapping[str, Any]) -> str:
        """A case in words: `{"world": 2, "subject": "ddp", "toy": "tied"}` -> "ddp-w2-tied"."""
        words = [str(case["subject"])] if "subject" in case else []
        words.append(f"w{case['world']}")
        for axis, values, ids in self._parameters():
            words.append(ids[values.index(case[axis])])
        return "-".join(words)

    def cases(self) -> Iterator[dict[str, Any]]:
        """Every situation in which the clause is judged: `world` (a size), `subject`, parameters.

        The same product that pytest runs, for those who run a clause without pytest.
        """
        axes: dict[str, list[Any]] = {"world": self.sizes}
        if self.judges:
            axes["subject"] = list(self.judges)
        axes |= {axis: values for axis, values, _ in self._parameters()}
        for case in itertools.product(*axes.values()):
            yield dict(zip(axes, case, strict=True))


REGISTER: dict[str, Clause] = {}
"""Every clause whose module has been imported, by id."""


def clause(
    id: str,
    *,
    level: str,
    judges: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    source: str,
    worlds: tuple[int, ...] = (2,),
    transports: tuple[str, ...] = ("gloo", "sim", "cuda"),
    no_impostor: str = "",
) -> Callable[[_Test], _Test]:
    """Register a test as a clause; its strength is the verb of its sentence.

    Raises:
        ValueError: for a malformed or repeated id, an unknown level, contract function or promise,
            or a docstring whose first line is not one sentence with one normative verb.
    """

    def register(test: _Test) -> _Test:
        sentence = (inspect.getdoc(test) or "").partition("\n")[0].strip()
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize" and "," in mark.args[0]:
                raise ValueError(f"clause {id}: one argument per parametrize, got {mark.args[0]!r}")
        strength = _validate(id, level, judges + needs, sentence)
        named = _qualified(id, source, judges + needs)
        earlier = REGISTER.get(id)
        if earlier is not None and earlier.test.__module__ != test.__module__:
            raise ValueError(f"clause {id!r} exists twice: {earlier.where} and {test.__module__}")
        fields = (sentence, strength, level, judges, needs, named, worlds, transports)
        REGISTER[id] = Clause(id, *fields, no_impostor, test)
        setattr(test, _MARK, REGISTER[id])
        return test

    return register


def clauses(**defaults: Any) -> Callable[..., Callable[[_Test], _Test]]:
    """Return `clause` with the defaults of one file; a clause overrides what differs."""
    return functools.partial(clause, **defaults)


def rows(declare: Callable[..., Any], law: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that declares a clause whose test is one call of a law.

    Args:
        declare: `clause`, with the defaults of the file.
        law: called with world, subject if it takes one, situation and what `clause` lacks.
    """
    of_law, of_clause = inspect.signature(law), inspect.signature(clause).parameters
    asked = [n for n in ("world", "subject") if n in of_law.parameters] + ["situation"]

    def row(id: str, sentence: str, situation: Any, **options: Any) -> Any:
        """Declare a clause for one situation, for several by name, or for each of a list."""
        how = {name: options.pop(name) for name in options.keys() - of_clause.keys()}
        of_law.bind(*asked, **how)  # a TypeError now, not in a run
        cases = {str(s): s for s in situation} if isinstance(situation, list | range) else situation
        test: Any = lambda **case: law(*[case.get(n, situation) for n in asked], **how)  # noqa: E731  # `def` has a line more
        names = asked if isinstance(cases, Mapping) else asked[:-1]
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(n, keyword) for n in names])
        # The test is where the row is: for the ledger, messages and tracebacks.
        caller = sys._getframe(1)
        place = {"co_filename": caller.f_code.co_filename, "co_firstlineno": caller.f_lineno}
        test.__code__ = test.__code__.replace(**place, co_name=id)
        test.__module__, test.__name__, test.__doc__ = caller.f_globals["__name__"], id, sentence
        if names is asked:
            test = pytest.mark.parametrize("situation", [*cases.values()], ids=[*cases])(test)
        return declare(id, **options)(test)

    return row


def clause_of(test: object) -> Clause | None:
    """The clause that a test function was registered as, if any."""
    found = getattr(test, _MARK, None)
    return found if isinstance(found, Clause) else None


def _qualified(id: str, source: str, functions: tuple[str, ...]) -> str:
    """Return the source with the promises that it names by their ids, or raise ValueError."""
    try:
        return promises.qualified(source, functions)
    except ValueError as error:
        raise ValueError(f"clause {id}: {error}") from None


def _validate(id: str, level: str, functions: tuple[str, ...], sentence: str) -> Strength:
    """Return the strength that the sentence states, or raise ValueError."""
    if not _ID.fullmatch(id):
        raise ValueError(f"clause id {id!r}: expected three or four dotted lower-case words")
    if level not in LEVELS:
        raise ValueError(f"clause {id}: level {level!r} is none of {LEVELS}")
    unknown = [name for name in functions if name not in FUNCTIONS]
    if unknown:
        raise ValueError(f"clause {id}: {unknown} are no functions of the contract")
    verbs = [strength for strength in Strength if strength in sentence.split()]
    if len(verbs) != 1 or not sentence.endswith(".") or len(sentence) > 100:
        raise ValueError(
            f"clause {id}: the docstring must begin with one sentence of at most 100 characters, "
            f"with one of MUST, SHOULD, MAY as its verb and a full stop; got {sentence!r}"
        )
    return verbs[0]
