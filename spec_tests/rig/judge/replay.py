"""A failing case is tried again, and its message says what came of it.

On live ranks, where it was found on simulated ones. A finding on sim is a finding; whether gloo
shows it too says how to go on: with a debugger on live processes, or with the schedule in hand
because nothing else shows it. Of a property the example is replayed that hypothesis has shrunk to,
of any other clause the case. Live ranks take no orders, so a drawn schedule is left out. Simulated
ranks are threads of one process. Where gloo passes and a module of the implementation keeps state,
the case is "not here", but for work that nobody waits for and for writes into what is in flight:
these are of one rank alone.

On the same ranks, where it was found on live ones. What is read or written while a collective is
under way has any value: a finding then looks like a sum today and like mixed-up rows tomorrow. So
the first failed case of a clause in which a tensor is wrong is run once more. Where its difference
is another one, or none, the finding is that, and nothing else. Simulated ranks say where: they see
each access to a buffer between the launch and the wait. Where they see none, sequences on fresh
ranks are compared, for code that keeps state from call to call differs as well, but each time in
the same way.

On fresh ranks, where it was found on used ones. Code that keeps state from one call to the next (a
module's global, a cache by id or by name) may fail in a case that passes alone: the line that is
printed would not show it again. So the first failing clauses of a chapter are tried alone, each on
fresh ranks. Where one passes, the cases before it are tried with it, and the line names their
clauses as well.
"""

from __future__ import annotations

import contextlib
import functools
import re
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from hypothesis.errors import Flaky

from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import SITUATION, Violation, runner, violated
from spec_tests.rig.outcomes import LEVELS, Outcome
from spec_tests.rig.ranks.errors import DIFFERS, NOT_HERE
from spec_tests.rig.ranks.pool import Pool
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.sim import Schedule, shared
from spec_tests.rig.strategies import nothing_shrunk
from spec_tests.rig.target import Target

_FINDINGS = (Outcome.FAILED, Outcome.HANG, Outcome.DIED)
_OF_ONE_RANK = ("un-waited", "buffer in flight")
"""Modes of findings on simulated ranks that are no matter of what they share."""

_TRIES = 3  # of a function that is known to differ: two runs may agree by chance
_SEQUENCE = 3  # runs on fresh ranks that are compared with as many others
_NEAREST = (1, 8)  # how many of the cases before it are tried with one that passes alone
# How many clauses of a chapter are tried alone. Each try starts a world, up to a second, and waits
# where it hangs; where the first ones fail alone as well, these functions do not suffer from state.
_ALONE = 2

_GIVEN = re.compile(r"^given: (?:(.*), )?[^,\n]*, [^,\n]*$", re.MULTILINE)
_SIZE = re.compile(r"^largest error (\S+)", re.MULTILINE)

Case = Mapping[str, Any]
"""A clause's parameters, with the number of ranks as `world`."""
Cases = Sequence[tuple[Clause, Case]]


@dataclass
class Replays:
    """What was tried again in a run.

    Attributes:
        seen: the cases that live ranks have seen.
        alone: the clauses that were tried alone, by implementation and chapter.
        repeated: the clauses that were run once more, by function.
        known: how the finding begins for a function whose second run differed; "" where that has
            another cause than a race.
        proofs: what simulated ranks say of such a function.
    """

    seen: WeakKeyDictionary[Pool, list[tuple[Clause, Case]]] = field(
        default_factory=WeakKeyDictionary
    )
    alone: defaultdict[tuple[Target, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    repeated: set[tuple[Target, str, str]] = field(default_factory=set)
    known: dict[tuple[Target, str], str] = field(default_factory=dict)
    proofs: dict[tuple[Target, str], str] = field(default_factory=dict)

    @contextlib.contextmanager
    def telling(self, clause: Clause, case: Case, world: World) -> Iterator[None]:
        """What fails within the block is told with what came of trying it again.

        Args:
            case: the clause's parameters without `world`.
            world: the ranks that it is judged on, simulated or on gloo.
        """
        assert world.target is not None  # a clause judges something
        pool = world.worlds.pool(world.size, world.target, world.transport)
        earlier, sized = self.seen.setdefault(pool, []), {**case, "world": world.size}
        with last_example(clause.test) as example:
            try:
                yield
            except BaseException as error:
                if runner.outcome_of(error) not in _FINDINGS:
                    raise
                values = {**case, **example, "world": world.size}
                if world.transport == "sim":
                    _tell_of_gloo(error, clause, values, world)
                elif found := self._differing(error, clause, values, world):
                    raise found from error
                elif earlier and self._passes_alone(error, clause, sized, world.target):
                    self.alone[world.target, clause.chapter].clear()
                    _tell(error, clause, _needed([*earlier, (clause, sized)], world.target))
                raise
            finally:
                earlier.append((clause, sized))

    # ------------------------------------------------------------------------- on the same ranks

    def _differing(
        self, error: BaseException, clause: Clause, case: Case, world: World
    ) -> Violation | None:
        """Return the finding that values differ from run to run, if they do."""
        assert world.target is not None
        function = (world.target, str(case.get("subject", "")))
        if world.size == 1 or not self._may_repeat(error, clause, function):
            return None
        again = with_values(clause)
        first = "" if isinstance(error, Flaky) else _difference(str(error))
        tries = _TRIES if self.known.get(function) else 1
        runs = (_run(again, world.target, case, world.worlds) for _ in range(tries))
        other = next((each for each in runs if each not in (None, first)), None)
        if other is None:
            return None
        if function not in self.known:
            self.known[function] = self._cause(function, again, case, world)
        if not self.known[function]:
            return None
        given, proof = _GIVEN.search(str(error)), self.proofs.get(function)
        lines = [f"one run: {_size(first)}, another: {_size(other)}", *([proof] if proof else [])]
        words = (given[1] or "") if given else ""
        found = violated(self.known[function], detail="\n".join(lines), given=words)
        for note in getattr(error, "__notes__", ()):  # the values that were drawn
            found.add_note(note)
        return found

    def _may_repeat(
        self, error: BaseException, clause: Clause, function: tuple[Target, str]
    ) -> bool:
        is_of_values = isinstance(error, Violation) and "wrong" in error.evidence
        if not is_of_values and not isinstance(error, Flaky):
            return False
        if self.known.get(function):
            return True
        key = (*function, clause.id)
        is_new = key not in self.repeated and function not in self.known
        self.repeated.add(key)
        return is_new

    def _cause(self, function: tuple[Target, str], clause: Clause, case: Case, world: World) -> str:
        """What is known of a function whose second run differed from the first."""
        target = function[0]
        if "sim" in clause.transports:
            found = runner.run_case(clause, target, case, world.worlds, transport="sim")
            if found.mode in _OF_ONE_RANK:
                said = found.message.splitlines()[1:2]
                self.proofs[function] = f"on simulated ranks: {''.join(said)}"
                return DIFFERS
        one, other = (
            [_shown(each) for each in _on_fresh_ranks([(clause, case)] * _SEQUENCE, target)]
            for _ in range(2)
        )
        return DIFFERS.partition(":")[0] if one != other else ""

    # ----------------------------------------------------------------------------- on fresh ranks

    def _passes_alone(
        self, error: BaseException, clause: Clause, case: Case, target: Target
    ) -> bool:
        tried = self.alone[target, clause.chapter]
        if runner.outcome_of(error) is Outcome.DIED or clause.id in tried or len(tried) >= _ALONE:
            return False
        tried.add(clause.id)
        return _passes([(clause, case)], target)


def _on_fresh_ranks(cases: Cases, target: Target) -> list[runner.CaseResult]:
    with contextlib.closing(Worlds()) as worlds, nothing_shrunk():
        return [runner.run_case(clause, target, case, worlds) for clause, case in cases]


def _passes(cases: Cases, target: Target) -> bool:
    """Whether the last of the cases passes on fresh ranks that have seen the others."""
    return _on_fresh_ranks(cases, target)[-1].outcome is Outcome.PASSED


def _needed(cases: Cases, target: Target) -> Cases:
    """As few of the last cases as make the very last one fail; all, if few do not suffice."""
    tries = (cases[-1 - count :] for count in _NEAREST if count < len(cases))
    return next((some for some in tries if not _passes(some, target)), cases)


def _tell(error: BaseException, clause: Clause, needed: Cases) -> None:
    here = SITUATION.get()
    before, ids = here.rerun, dict.fromkeys(each.id for each, _ in needed)
    here.rerun = before.replace(
        f"--clause {clause.id}", " ".join(f"--clause {name}" for name in ids)
    )
    if LEVELS[-1] in {each.level for each, _ in needed} and "--level" not in before:
        here.rerun += f" --level {LEVELS[-1]}"
    if error.args and isinstance(error.args[0], str):  # of a violation: its text is complete
        error.args = (error.args[0].replace(f"again: {before}", f"again: {here.rerun}"),)
    error.add_note(
        "alone on fresh ranks this case passed: it fails after other cases in the same processes, "
        "or sometimes; look for state that outlives a call, such as a cache by id, or for a race"
    )


# ------------------------------------------------------------------- what a run shows, and of what


def _run(clause: Clause, target: Target, case: Case, worlds: Worlds) -> str | None:
    return _shown(runner.run_case(clause, target, case, worlds))


def _shown(found: runner.CaseResult) -> str | None:
    """The difference that a run shows, "" if it passes; None if it ends in another way."""
    if found.outcome is Outcome.PASSED:
        return ""
    return _difference(found.message) if found.mode == "assertion" else None


def _difference(message: str) -> str:
    """What is wrong, without the situation."""
    return message.partition("\ngiven: ")[0]


def _size(difference: str) -> str:
    """Which tensor is wrong in a run, and by how much."""
    if not difference:
        return "all is right"
    place = difference.splitlines()[1].partition(": expected")[0]
    size = _SIZE.search(difference)
    return f"{place} is off by {size[1]}" if size else place


@contextlib.contextmanager
def last_example(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """What a property was last called with, besides its case: at its end, the shrunk example."""
    example: dict[str, Any] = {}
    handle = getattr(test, "hypothesis", None)
    if handle is None:
        yield example
        return
    inner = handle.inner_test

    @functools.wraps(inner)
    def remember(*args: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        example.clear()
        example.update(drawn)
        inner(*args, **drawn)

    with mock.patch.object(handle, "inner_test", remember):
        yield example


def with_values(clause: Clause) -> Clause:
    """Return a clause whose test is given the values that hypothesis would draw."""
    handle = getattr(clause.test, "hypothesis", None)
    return clause if handle is None else replace(clause, test=handle.inner_test)


# ------------------------------------------------------------------------------- on live ranks


def _is_of_its_order(clause: Clause, case: Case, world: World) -> bool:
    """Whether simulated ranks pass a case in the plain order, and fail in the drawn one."""
    if "schedule" not in case:
        return False
    assert world.target is not None
    plain = {**case, "schedule": Schedule()}
    with nothing_shrunk():
        found = runner.run_case(clause, world.target, plain, world.worlds, transport="sim")
    return found.outcome is Outcome.PASSED


def _shared(world: World) -> str:
    assert world.target is not None
    return shared.state_of(world.target, world.live.run(shared.loaded)[0])


def _tell_of_gloo(error: BaseException, clause: Clause, case: Case, world: World) -> None:
    """Note whether live ranks show what simulated ones did.

    Raises:
        unittest.SkipTest: they do not, and simulated ranks share state of the implementation, or
            one waits outside of a collective for ranks that wait for their turn.
    """
    assert world.target is not None
    again = with_values(clause)
    is_nan = bool(re.search(r"\bnan\b", str(error)))
    in_flight = getattr(SITUATION.get().observed, "in_flight", ())[:2] if is_nan else ()
    for words in in_flight:
        error.add_note(f"not waited for {words}")
    with nothing_shrunk():
        found = runner.run_case(again, world.target, case, world.worlds, transport="gloo")
    if is_nan and not in_flight and not re.search(r"\bnan\b", found.message):
        error.add_note("NaN on simulated ranks alone: perhaps read before it was waited for")
    has_passed = found.outcome is Outcome.PASSED
    may_share = has_passed and not _is_of_its_order(again, case, world)
    if may_share and runner.mode_of(error) == "hang":
        raise unittest.SkipTest(
            f"{NOT_HERE}simulated ranks take turns: one waits for others outside of a collective"
        ) from error
    may_share = may_share and runner.mode_of(error) not in _OF_ONE_RANK
    if may_share and (state := _shared(world)):
        raise unittest.SkipTest(
            f"{NOT_HERE}simulated ranks are of one process, and share {state}"
        ) from error
    lines = (line for line in found.message.splitlines() if line and not line.startswith("["))
    as_well = " as well" * (found.outcome is runner.outcome_of(error))
    said = "passed" if has_passed else f"{found.outcome}{as_well}: {next(lines, '')}"
    drawn = "; live ranks take no schedule" if "gloo" not in clause.transports else ""
    error.add_note(f"replayed on gloo: {said}{drawn}")
