"""A failed case is run once more: what differs from run to run has no other cause to be told.

What is read or written while a collective is under way has any value. A finding on live ranks then
looks like a sum today and like mixed-up rows tomorrow. So the first failed case of a clause in
which a tensor is wrong is run once more on the same ranks. Where its difference is another one, or
none, the finding is that, and nothing else. Simulated ranks say where: they see each access to a
buffer between the launch and the wait. Where they see none, sequences on fresh ranks are compared,
for code that keeps state from call to call differs as well, but each time in the same way.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis.errors import Flaky

from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import Violation, runner, violated
from spec_tests.rig.judge.replay import last_example, with_values
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import DIFFERS
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.target import Target

_PROOFS = ("buffer in flight", "un-waited")
_SEQUENCE = 3
_TRIES = 3  # of a function that is known to differ: two runs may agree by chance
_GIVEN = re.compile(r"^given: (?:(.*), )?[^,\n]*, [^,\n]*$", re.MULTILINE)
_SIZE = re.compile(r"^largest error (\S+)", re.MULTILINE)

_Differing = str | None
"""How the finding begins for a function whose values differ; None where they do not."""


@dataclass
class Repeats:
    """What was run once more, and which functions differ from run to run."""

    tried: set[tuple[Target, str, str]] = field(default_factory=set)
    known: dict[tuple[Target, str], _Differing] = field(default_factory=dict)
    proofs: dict[tuple[Target, str], str] = field(default_factory=dict)

    @contextlib.contextmanager
    def telling(self, clause: Clause, case: Mapping[str, Any], world: World) -> Iterator[None]:
        """What fails within the block is a finding of its own if it differs from run to run.

        Args:
            case: the clause's parameters, with the number of ranks as `world`.
            world: the live ranks that it is judged on.
        """
        with last_example(clause.test) as example:
            try:
                yield
            except (Violation, Flaky) as error:
                values = {**case, **example, "world": world.size}
                if found := self._differing(error, with_values(clause), values, world):
                    for note in getattr(error, "__notes__", ()):  # the values that were drawn
                        found.add_note(note)
                    raise found from error
                raise

    def _differing(
        self, error: Violation | Flaky, clause: Clause, case: Mapping[str, Any], world: World
    ) -> Violation | None:
        assert world.target is not None  # a clause judges something
        function = (world.target, str(case.get("subject", "")))
        if world.size == 1 or not self._may_try(error, clause, function):
            return None
        first = "" if isinstance(error, Flaky) else _difference(str(error))
        tries = _TRIES if self.known.get(function) else 1
        runs = (_run(clause, world.target, case, world.worlds) for _ in range(tries))
        other = next((each for each in runs if each not in (None, first)), None)
        if other is None:
            return None
        if function not in self.known:
            self.known[function] = self._cause(function, clause, case, world)
        begins = self.known[function]
        return (
            _violation(error, begins, first, other, self.proofs.get(function)) if begins else None
        )

    def _may_try(
        self, error: Violation | Flaky, clause: Clause, function: tuple[Target, str]
    ) -> bool:
        if isinstance(error, Violation) and "wrong" not in error.evidence:
            return False  # no tensor's value
        if self.known.get(function):
            return True
        key = (*function, clause.id)
        is_new = key not in self.tried and function not in self.known
        self.tried.add(key)
        return is_new

    def _cause(
        self, function: tuple[Target, str], clause: Clause, case: Mapping[str, Any], world: World
    ) -> _Differing:
        """What is known of a function whose second run differed from the first."""
        target = function[0]
        if "sim" in clause.transports:
            found = runner.run_case(clause, target, case, world.worlds, transport="sim")
            if found.mode in _PROOFS:
                said = found.message.splitlines()[1:2]
                self.proofs[function] = f"on simulated ranks: {''.join(said)}"
                return DIFFERS
        one, other = _fresh(clause, target, case), _fresh(clause, target, case)
        return DIFFERS.partition(":")[0] if one != other else None


def _run(clause: Clause, target: Target, case: Mapping[str, Any], worlds: Worlds) -> str | None:
    """The difference that a run shows, "" if it passes; None if it ends in another way."""
    found = runner.run_case(clause, target, case, worlds)
    if found.outcome is Outcome.PASSED:
        return ""
    return _difference(found.message) if found.mode == "assertion" else None


def _fresh(clause: Clause, target: Target, case: Mapping[str, Any]) -> Sequence[str | None]:
    """What runs on fresh ranks show, one after the other."""
    with contextlib.closing(Worlds()) as worlds:
        return [_run(clause, target, case, worlds) for _ in range(_SEQUENCE)]


def _difference(message: str) -> str:
    """What is wrong, without the situation."""
    return message.partition("\ngiven: ")[0]


def _violation(
    error: Violation | Flaky, begins: str, first: str, other: str, proof: str | None
) -> Violation:
    given = _GIVEN.search(str(error))
    lines = [f"one run: {_size(first)}, another: {_size(other)}", *([proof] if proof else [])]
    return violated(begins, detail="\n".join(lines), given=(given[1] or "") if given else "")


def _size(difference: str) -> str:
    """Which tensor is wrong in a run, and by how much."""
    if not difference:
        return "all is right"
    place = difference.splitlines()[1].partition(": expected")[0]
    size = _SIZE.search(difference)
    return f"{place} is off by {size[1]}" if size else place
