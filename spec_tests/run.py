"""What one pytest process knows of its run; shared by the two halves of the plugin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from spec_tests.clause import Clause, clause_of
from spec_tests.rig.eventlog import EventLog
from spec_tests.rig.expectations import Deviation
from spec_tests.rig.fresh import History
from spec_tests.rig.world import Worlds
from spec_tests.target import Target


@dataclass
class Run:
    """The implementations, their levels and deviations, the live worlds, and what came out.

    `points` is the profile of a course, if one was asked for; `told` is what a report says about
    each clause; `notices` is what differs from what was asked for; `running` is
    the case that runs; `history` is what the live ranks have seen.
    """

    targets: list[Target]
    levels: dict[str, str]
    transport: str
    deviations: dict[str, list[Deviation]]
    worlds: Worlds
    log: EventLog | None = None
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    points: dict[str, Any] | None = None
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    running: str = ""
    history: History = field(default_factory=History)


@dataclass
class _Active:
    run: Run | None = None


RUN = pytest.StashKey[Run]()

ACTIVE = _Active()
"""The run of the one process that writes the log: no xdist worker. For hooks without a config."""


def clause_of_item(item: pytest.Item) -> Clause | None:
    """The clause that an item judges, if any."""
    return clause_of(getattr(item, "function", None))


def is_worker(config: pytest.Config) -> bool:
    """True in an xdist worker, which has no part in the log.

    Not by xdist's environment variable: a run that a test starts within a worker inherits that.
    """
    return hasattr(config, "workerinput")
