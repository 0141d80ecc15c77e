"""A failing case is tried again elsewhere, and its message says what came of it.

On live ranks, where it was found on simulated ones. A finding on sim is a finding; whether gloo
shows it too says how to go on: with a debugger on live processes, or with the schedule in hand
because nothing else shows it. Of a property the example is replayed that hypothesis has shrunk to,
of any other clause the case. Live ranks take no orders, so a drawn schedule is left out. Simulated
ranks are threads of one process. Where gloo passes and a module of the implementation keeps state,
the case is "not here", but for work that nobody waits for and for writes into what is in flight:
these are of one rank alone.

On fresh ranks, where it was found on live ones. Ranks are reused between cases. Code that keeps
state from one call to the next (a module's global, a cache by id or by name) may then fail in a
case that passes alone: the line that is printed would not show it again. So the first failing
clauses of a chapter are tried alone, each on fresh ranks. Where one passes, the cases before it are
tried with it, and the line names their clauses as well.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import SITUATION, runner
from spec_tests.rig.outcomes import LEVELS, Outcome
from spec_tests.rig.ranks.errors import DIFFERS, NOT_HERE, RankHung
from spec_tests.rig.ranks.world import AnyPool, World, Worlds
from spec_tests.rig.sim import shared
from spec_tests.rig.strategies import nothing_shrunk
from spec_tests.rig.target import Target

# ------------------------------------------------------------------------------- on live ranks

_FINDINGS = (Outcome.FAILED, Outcome.HANG, Outcome.DIED)
_ON_GLOO = "replayed on gloo: "
_OF_ONE_RANK = ("un-waited", "buffer in flight")


@contextlib.contextmanager
def telling(clause: Clause, case: Mapping[str, Any], world: World) -> Iterator[None]:
    """What is raised within the block gets a note: does gloo show it too?

    Args:
        case: the clause's parameters without `world`.
        world: the simulated ranks; those on gloo are made of the same implementation.
    """
    with last_example(clause.test) as example:
        try:
            yield
        except BaseException as error:
            if runner.outcome_of(error) in _FINDINGS:
                assert world.target is not None  # a clause judges something
                said = _on_gloo(clause, {**case, **example}, world.target, world, error)
                passed = said.startswith(f"{_ON_GLOO}passed")
                passed = passed and runner.mode_of(error) not in _OF_ONE_RANK
                if passed and (state := shared.state_of(world.target)):
                    raise unittest.SkipTest(
                        f"{NOT_HERE}simulated ranks are of one process, and share {state}"
                    ) from error
                error.add_note(said)
            raise


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


def _on_gloo(
    clause: Clause, values: dict[str, Any], target: Target, world: World, error: BaseException
) -> str:
    case = {**values, "world": world.size}
    with nothing_shrunk():
        found = runner.run_case(with_values(clause), target, case, world.worlds, transport="gloo")
    lines = (line for line in found.message.splitlines() if line and not line.startswith("["))
    failed = found.outcome is not Outcome.PASSED
    drawn = "; live ranks take no schedule" if "gloo" not in clause.transports else ""
    as_well = " as well" * (found.outcome is runner.outcome_of(error))
    said = f"{found.outcome}{as_well}: {next(lines, '')}" if failed else "passed"
    return f"{_ON_GLOO}{said}{drawn}"


# ------------------------------------------------------------------------------- on fresh ranks

Cases = Sequence[tuple[Clause, Mapping[str, Any]]]

# How many of the cases before it are tried with one that passes alone.
_NEAREST = (1, 8)
# How many clauses of a chapter are tried alone. Each try starts a world, up to a second, and waits
# where it hangs; where the first ones fail alone as well, these functions do not suffer from state.
_TRIES = 2


@dataclass
class History:
    """The cases that live ranks have seen, and the clauses that were tried alone."""

    seen: WeakKeyDictionary[AnyPool, list[tuple[Clause, Mapping[str, Any]]]] = field(
        default_factory=WeakKeyDictionary
    )
    tried: dict[tuple[Target, str], set[str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def telling(self, clause: Clause, case: Mapping[str, Any], world: World) -> Iterator[None]:
        """What fails within the block is told apart from what fails alone.

        Args:
            case: the clause's parameters, with the number of ranks as `world`.
            world: the ranks that it is judged on.
        """
        target = world.target
        assert target is not None  # a clause judges something
        earlier = self.seen.setdefault(world.worlds.pool(world.size, target, "gloo"), [])
        try:
            yield
        except (Exception, RankHung) as error:
            if (
                runner.outcome_of(error) in (Outcome.FAILED, Outcome.HANG)
                and DIFFERS.partition(":")[0] not in str(error)
                and earlier
                and self._may_try(clause, target)
                and _passes([(clause, case)], target)
            ):
                self.tried[target, clause.chapter].clear()
                _tell(error, clause, _needed([*earlier, (clause, case)], target))
            raise
        finally:
            earlier.append((clause, case))

    def _may_try(self, clause: Clause, target: Target) -> bool:
        tried = self.tried.setdefault((target, clause.chapter), set())
        if clause.id in tried or len(tried) >= _TRIES:
            return False
        tried.add(clause.id)
        return True


def _passes(cases: Cases, target: Target) -> bool:
    """Whether the last of the cases passes on fresh ranks that have seen the others."""
    with contextlib.closing(Worlds()) as worlds, nothing_shrunk():
        found = [runner.run_case(clause, target, case, worlds) for clause, case in cases]
    return found[-1].outcome is Outcome.PASSED


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
