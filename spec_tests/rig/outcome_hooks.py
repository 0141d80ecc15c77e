"""From a test's end to a line of the log, and from the log to a verdict: half of the plugin.

pytest knows passed, failed and skipped. The suite's outcomes are finer, so each report is given its
own before pytest sees it, and the log's line travels with it, also from an xdist worker. `Run` is
what one pytest process knows of its run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from spec_tests.rig import ledger
from spec_tests.rig.clause import MUST, Clause, clause_of
from spec_tests.rig.judge import (
    evidence,
    expectations,
    judging,
    replay,
    runner,
    unreadable_is_a_finding,
)
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import NotOffered, RankDied, RankHung
from spec_tests.rig.ranks.world import NOTICE, World, Worlds
from spec_tests.rig.report import write_report
from spec_tests.rig.report.causes import source_of
from spec_tests.rig.report.ending import render_ending
from spec_tests.rig.report.eventlog import EventLog
from spec_tests.rig.report.points import render_points
from spec_tests.rig.strategies import nothing_shrunk
from spec_tests.rig.target import Target


@dataclass
class Run:
    """The implementations, their levels and deviations, the live worlds, and what came out.

    `points` is the profile of a course, if one was asked for; `told` is what a report says about
    each clause; `notices` is what differs from what was asked for; `running` is
    the case that runs; `replays` is what was tried again; `failed` has implementations and clauses
    that they failed; `hung` the hung cases by implementation, clause and subject; `quick` the
    clauses of a quick run.
    """

    active: ClassVar[Run | None] = None
    """That of the one process that writes the log: no xdist worker. For hooks without a config."""

    targets: list[Target]
    levels: dict[str, str]
    transport: str
    deviations: dict[str, list[expectations.Deviation]]
    worlds: Worlds
    log: EventLog | None = None
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    points: dict[str, Any] | None = None
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    running: str = ""
    replays: replay.Replays = field(default_factory=replay.Replays)
    failed: set[tuple[str, str]] = field(default_factory=set)
    quick: set[str] = field(default_factory=set)
    hung: dict[tuple[str, str, str | None], list[str]] = field(default_factory=dict)


RUN = pytest.StashKey[Run]()


def clause_of_item(item: pytest.Item) -> Clause | None:
    """The clause that an item judges, if any."""
    return clause_of(getattr(item, "function", None))


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a clause's case: `target`, `world`, `subject` and the clause's own."""
    found: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]  # parametrised
    return found


def is_worker(config: pytest.Config) -> bool:
    """True in an xdist worker, which has no part in the log.

    Not by xdist's environment variable: a run that a test starts within a worker inherits that.
    """
    return hasattr(config, "workerinput")


_PROPERTIES = ("clause", "case", "implementation", "world_size", "transport", "level", "outcome")
"""Of each case in JUnit's XML: pytest knows passed, failed and skipped alone."""
_CASE = pytest.StashKey[str]()
_SITUATION = pytest.StashKey[Any]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Violations name the clause, and margins are collected, while an item runs."""
    clause = clause_of_item(item)
    if clause is None:
        return (yield)
    target, run = _begin(item, clause), item.config.stash[RUN]
    run.running = f"{clause.id} ({item.stash[_CASE]}) on {target.name}"
    with judging(item.stash[_SITUATION]):
        found = yield
    run.running = ""  # not after an interrupt
    return found


def _begin(item: pytest.Item, clause: Clause) -> Target:
    """Stash the case and its situation; returns the implementation that is judged."""
    params = parameters_of(item)
    case = {k: v for k, v in params.items() if k != "target"}
    target: Target = params["target"]
    label, transport = clause.label(case), item.config.stash[RUN].transport
    item.stash[_CASE] = label
    item.stash[_SITUATION] = runner.situation(clause, target, case, label, transport=transport)
    return target


def left_out(items: list[pytest.Item], run: Run) -> list[pytest.Item]:
    """What is left to run of `items` once cases of functions that are not offered are logged.

    These need no test of their own, and there are thousands. Where nothing would be left, all stay.
    """
    missing = {item: why for item in items if (why := _not_offered(item, run)) is not None}
    if len(missing) == len(items):
        return items
    for item, why in missing.items():
        clause = clause_of_item(item)
        assert clause is not None  # only clauses are not offered
        _keep(_result(item, clause, 0.0, why, run), run)
    return [item for item in items if item not in missing]


def _not_offered(item: pytest.Item, run: Run) -> NotOffered | None:
    clause = clause_of_item(item)
    if clause is None or run.transport not in clause.transports:
        return None
    smallest = run.worlds.world(1, _begin(item, clause), transport=run.transport)
    with contextlib.suppress(Exception):  # the test itself says what is wrong, in its own words
        try:
            runner.require_offered(smallest, clause, parameters_of(item).get("subject"))
        except NotOffered as why:
            return why
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """What a clause finds is tried again elsewhere, unless it was expected: see `judge.replay`."""
    clause = clause_of_item(item)
    arguments = getattr(item, "funcargs", {})
    world = arguments.get("world")
    if clause is None or not isinstance(world, World):
        return (yield)
    params = parameters_of(item)
    case = {name: value for name, value in params.items() if name not in ("target", "world")}
    with contextlib.ExitStack() as around:
        name, run = params["target"].name, item.config.stash[RUN]
        if (name, clause.id) in run.failed:  # one shortened example of a clause is enough
            around.enter_context(nothing_shrunk())
        if _declared(item, clause, name):
            around.enter_context(nothing_shrunk())
        elif world.transport != "cuda":
            around.enter_context(run.replays.telling(clause, case, world))
        around.enter_context(unreadable_is_a_finding())
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn pytest's three words into the suite's outcomes, and attach the log's line."""
    # Before the yield: pytest's own unittest plugin replaces a SkipTest by its own exception.
    error = call.excinfo.value if call.excinfo is not None else None
    found = yield
    clause = clause_of_item(item)
    if isinstance(error, RankHung | RankDied) and clause is None:
        found.sections.append(("ranks", str(error)))
    if clause is None or (call.when != "call" and error is None):
        return found
    run = item.config.stash[RUN]
    result = _result(item, clause, call.duration, error, run)
    found.trainspec = result  # type: ignore[attr-defined]  # reports carry what they are given
    item.user_properties += [(key, result[key]) for key in _PROPERTIES]
    _show(found, clause, result)
    return found


def _result(
    item: pytest.Item,
    clause: Clause,
    duration_s: float,
    error: BaseException | None,
    run: Run,
) -> dict[str, Any]:
    situation, params = item.stash[_SITUATION], parameters_of(item)
    name = params["target"].name
    outcome = runner.outcome_of(error)
    result = {
        "clause": clause.id,
        "implementation": name,
        "case": item.stash[_CASE],
        "subject": situation.subject,
        "node": item.nodeid,
        "line": item.location[1],
        "world_size": params["world"],
        "transport": run.transport,
        "strength": str(clause.strength),
        "level": clause.level,
        "outcome": str(outcome),
        "duration_s": duration_s,
        "message": runner.message_of(error),
        "margins": [max(situation.margins, key=lambda m: m["ratio"])] if situation.margins else [],
        "rerun": situation.rerun,
        "leaks": list(run.worlds.leaks),
    }
    run.worlds.leaks.clear()
    source = {"source": found} if (found := source_of(result["message"])) else {}
    if found := {**evidence.of(error), **source}:
        result["evidence"] = found
    result = expectations.expect(result, _declared(item, clause, name))
    if result["outcome"] == Outcome.FAILED:
        run.failed.add((name, clause.id))
    if result["outcome"] == Outcome.HANG:
        run.hung.setdefault((name, clause.id, params.get("subject")), []).append(result["case"])
    return result


def _declared(item: pytest.Item, clause: Clause, name: str) -> expectations.Deviation | None:
    """The deviation that the implementation `name` has declared for this case, if any."""
    return expectations.find(
        item.config.stash[RUN].deviations[name],
        clause.id,
        item.stash[_CASE],
        torch_version=torch.__version__,
    )


def _show(found: pytest.TestReport, clause: Clause, result: dict[str, Any]) -> None:
    """Make pytest's own summary and exit status agree with the outcome."""
    outcome = Outcome(result["outcome"])
    if outcome is Outcome.EXPECTED_FAILURE:
        found.outcome, found.wasxfail = "skipped", result["message"].partition("\n")[0]
    elif outcome is Outcome.UNEXPECTED_PASS:
        found.outcome, found.longrepr = "failed", result["message"]
    elif outcome in (Outcome.FAILED, Outcome.HANG, Outcome.DIED) and clause.strength != MUST:
        found.outcome, found.wasxfail = "skipped", f"{clause.strength} advises only"


def result_of(report: pytest.TestReport) -> dict[str, Any] | None:
    """The log's line of a clause's case, if the report has one."""
    return getattr(report, "trainspec", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep results of this process, and of xdist workers, for the log."""
    run = Run.active
    if run is None:
        return
    if value := result_of(report):
        _keep(value, run)
    elif report.failed and run.log is not None:
        run.log.problem(f"{report.nodeid} failed outside of any clause")


def _keep(value: dict[str, Any], run: Run) -> None:
    run.results.setdefault(value["implementation"], []).append(value)
    if run.log is not None:
        if told := run.told.get(value["clause"]):
            run.log.tell(value["clause"], **told)
        run.log.result(**value)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close the worlds, find stale expectations, write the footer and the report."""
    run = session.config.stash[RUN]
    run.worlds.close()
    if run.log is None or is_worker(session.config):
        return
    if not _came_to_its_end(session):
        run.log.close()  # without a footer: no verdict, whatever has been seen so far
        _write_report(session.config, run.log.path)
        return
    declared = any(run.deviations.values())
    known = {clause.id for clause in ledger.load_all()} if declared else set()
    for name, deviations in run.deviations.items():
        results = run.results.get(name, [])
        for problem in expectations.problems(
            deviations,
            results,
            torch_version=torch.__version__,
            today=date.fromtimestamp(time.time()),
            is_full_run=not _selects_cases(session.config),
            unselected=known - {result["clause"] for result in results},
        ):
            run.log.problem(problem)
    status = run.log.finish()
    if status > int(session.exitstatus):
        session.exitstatus = status
    _write_report(session.config, run.log.path)


def _write_report(config: pytest.Config, log: Path) -> None:
    if not config.getoption("--report-is-scratch"):
        write_report(config.getoption("--report"), log)


def _selects_cases(config: pytest.Config) -> bool:
    """True if pytest was told to run some cases of a clause and not the others."""
    selecting = ("keyword", "markexpr", "deselect", "lf")
    by_option = any(config.getoption(name, None) for name in selecting)
    return by_option or any("::" in argument for argument in config.args)


def _came_to_its_end(session: pytest.Session) -> bool:
    """False after Ctrl-C, -x, --maxfail or an internal error: something was not judged."""
    ended = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return ended and not session.shouldstop and not session.shouldfail


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """The table clause by implementation, and the verdict; nothing of a run that never began."""
    run = config.stash[RUN]
    if exitstatus == pytest.ExitCode.USAGE_ERROR and not run.results:
        return
    live: Any = config.pluginmanager.get_plugin("trainspec-live")
    if exitstatus == pytest.ExitCode.INTERRUPTED and (run.running or live):
        during = f" during {run.running}" if run.running else ""
        judged = f", {live.done} were judged" if live else ""
        terminalreporter.write_line(f"interrupted{during}{judged}")
    every = chain.from_iterable(run.results.values())
    noted = {f"{leak} ({r['clause']})": None for r in every for leak in r["leaks"]}
    for line in (each for each in noted if each.startswith(NOTICE)):
        terminalreporter.write_line(line)
    if run.log is None:
        terminalreporter.write_line("\n".join(f"notice: {notice}" for notice in run.notices))
    else:
        if points := render_points(run.log.events):
            terminalreporter.section("points")
            terminalreporter.write_line(points)
        terminalreporter.section(f"verdict after {live.seconds:.0f} s" if live else "verdict")
        everything = config.getoption("--all")
        terminalreporter.write_line(render_ending(run.log.events, everything=everything))
        if not config.getoption("--report-is-scratch"):
            terminalreporter.write_line(f"report: {config.getoption('--report')}/index.html")
