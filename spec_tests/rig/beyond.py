"""What the next level would add to a run that conforms: clauses, and the command for them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from spec_tests.rig import ledger
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import runner
from spec_tests.rig.outcome_hooks import Run
from spec_tests.rig.outcomes import LEVELS
from spec_tests.rig.ranks.errors import Blocked, NotOffered, RankDied, RankHung, RigError
from spec_tests.rig.ranks.world import World
from spec_tests.rig.target import Target


def beyond(run: Run, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the footer of a log says under `next`, for each implementation that can go on.

    Args:
        patterns: of clause ids, that the run was asked for; none means all.
    """
    asked = (clause for clause in ledger.load_all() if clause.matches(patterns or "*"))
    clauses = [clause for clause in asked if run.transport in clause.transports]
    found = []
    for target in run.targets:
        level, added = _added(run, target, clauses)
        if added:
            command = ["python", "-m", "spec_tests", "--impl", target.name]
            command += ["--clause", ",".join(patterns)] * bool(patterns) + ["--level", level]
            command += ["--transport", run.transport] * (run.transport != "gloo")
            command += ["--pretend-cuda"] * (target.pretends_cuda and target.layout is None)
            found.append(
                {
                    "implementation": target.name,
                    "level": level,
                    "clauses": added,
                    "command": shlex.join(command),
                }
            )
    return found


def _added(run: Run, target: Target, clauses: Sequence[Clause]) -> tuple[str, list[str]]:
    """The lowest level above the implementation's own that judges more of what it offers."""
    for level in LEVELS[LEVELS.index(run.levels[target.name]) + 1 :]:
        try:
            world = run.worlds.world(1, target, transport=run.transport)
            added = [c.id for c in clauses if c.level == level and _is_offered(world, c)]
        except (RankDied, RankHung, RigError):  # the run has said so
            return "", []
        if added:
            return level, added
    return "", []


def _is_offered(world: World, clause: Clause) -> bool:
    for subject in clause.judges or [None]:
        try:
            runner.require_offered(world, clause, subject)
        except (NotOffered, Blocked):
            continue
        return True
    return False
