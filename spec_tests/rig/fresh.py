"""A failure that needs what earlier cases have left in the same ranks says so, and how to see it.

Ranks are reused between cases. Code that keeps state from one call to the next (a module's global,
a cache by id or by name) may then fail in a case that passes alone: the line that is printed would
not show it again. So the first failing clauses of a chapter are tried alone, each on fresh ranks.
Where one passes, the cases before it are tried with it, and the line names their clauses as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from spec_tests.clause import LEVELS, Clause
from spec_tests.rig import runner
from spec_tests.rig.judge import SITUATION
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.world import AnyPool, World, Worlds
from spec_tests.target import Target

Cases = Sequence[tuple[Clause, Mapping[str, Any]]]

# How many of the cases before it are tried with one that passes alone.
_NEAREST = (1, 8)
# How many clauses of a chapter are tried alone. Each try starts a world, up to a second; where the
# first ones fail alone as well, state is not what these functions suffer from.
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
        except Exception as error:
            if (
                runner.outcome_of(error) is Outcome.FAILED
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
    worlds = Worlds()
    try:
        found = [runner.run_case(clause, target, case, worlds) for clause, case in cases]
    finally:
        worlds.close()
    return found[-1].outcome is Outcome.PASSED


def _needed(cases: Cases, target: Target) -> Cases:
    """As few of the last cases as make the very last one fail; all, if few do not suffice."""
    tries = (cases[-1 - count :] for count in _NEAREST if count < len(cases))
    return next((some for some in tries if not _passes(some, target)), cases)


def _tell(error: Exception, clause: Clause, needed: Cases) -> None:
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
        "alone on fresh ranks this case passes: it fails after other cases in the same processes; "
        "look for state that outlives a call, such as a global or a cache by id or name"
    )
