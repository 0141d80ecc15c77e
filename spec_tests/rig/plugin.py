"""The pytest plugin: options, parameters, fixtures; its other half is `outcome_hooks`.

Loaded through the `pytest11` entry point, so that an installed suite has it too, or by the root
conftest.py in a bare checkout. What a clause is judged on comes from its decorator: the plugin
turns `judges`, `worlds` and `--impl` into pytest parameters and nothing else.

Options: --impl (repeatable), --clause PATTERN (repeatable), --level, --transport, --profile,
--pretend-cuda, --report DIR, --points PROFILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import unittest
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from spec_tests.rig.ranks.zygote import start_zygote

# The zygote imports torch while this process imports it too: begin before the imports below.
start_zygote()

# ruff: noqa: E402 - for that reason the other imports come late
import torch
from hypothesis import settings

from spec_tests import impls
from spec_tests.rig import ledger, live, outcome_hooks, target
from spec_tests.rig.clause import MUST, TELLING_SIZE, Clause, clause_of
from spec_tests.rig.judge import expectations, runner
from spec_tests.rig.outcome_hooks import RUN, Run, clause_of_item, is_worker, parameters_of
from spec_tests.rig.outcomes import LEVELS, is_within
from spec_tests.rig.ranks.cuda_runtime import PRETENDED_CUDA
from spec_tests.rig.ranks.errors import NOT_HERE, RankDied, RankHung, RigError
from spec_tests.rig.ranks.world import TRANSPORTS, World, Worlds
from spec_tests.rig.report import diagnosis, points
from spec_tests.rig.report.eventlog import EventLog
from spec_tests.rig.sim import hooks
from spec_tests.rig.strategies import register_profiles

# The reference and its peer are held to everything; others, unless they ask, to what is right.
DEFAULT_LEVELS = {"solution": "production", "torch": "production"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; `python -m spec_tests` hands them through."""
    group = parser.getgroup("trainspec", "specification of data-parallel training")
    group.addoption("--impl", action="append", help="implementation: name, module or path")
    group.addoption("--clause", action="append", help="only clauses whose id matches (glob)")
    group.addoption("--level", choices=LEVELS, help="judge clauses up to this level")
    group.addoption(
        "--transport", choices=list(TRANSPORTS), default="gloo", help="where the ranks live"
    )
    group.addoption(
        "--profile", choices=("quick", "deep"), default="quick", help="hypothesis profile"
    )
    group.addoption(
        "--pretend-cuda",
        action="store_true",
        help="stand in for CUDA where there is none, as is done for the courses' layouts",
    )
    group.addoption("--report", metavar="DIR", help="write log, pages and files for tools there")
    group.addoption("--points", metavar="PROFILE", help="points as a course gives them, see README")
    group.addoption(
        "--quick",
        action="store_true",
        help="some seconds per chapter: the clauses that reject most of its near-misses",
    )
    group.addoption(
        "--fresh",
        action="store_true",
        help="new processes for each case: for code with state of the process, or to find it",
    )
    group.addoption("--all", action="store_true", help="show each finding and clause at the end")
    group.addoption("--live", action="store_true", help=argparse.SUPPRESS)
    # Set by `python -m spec_tests` where no report was asked for: it still needs the log.
    group.addoption("--report-is-scratch", action="store_true", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)  # before pytest's own writer of JUnit's XML looks for its option
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the implementations and open what the run needs."""
    directory = config.getoption("--report")
    if directory and not config.getoption("--report-is-scratch") and not config.option.xmlpath:
        config.option.xmlpath = os.path.join(directory, "junit.xml")  # noqa: PTH118 - it takes a string
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.pluginmanager.register(outcome_hooks)
    # Thread counts change the bits of a matrix product: the oracle computes as the ranks do.
    torch.set_num_threads(1)
    register_profiles()
    settings.load_profile(config.getoption("--profile"))
    config.stash[RUN] = _make_run(config)


def _make_run(config: pytest.Config) -> Run:
    try:
        targets = [impls.parse(spec) for spec in config.getoption("--impl") or ["solution"]]
        if config.getoption("--pretend-cuda"):
            targets = [dataclasses.replace(each, pretends_cuda=True) for each in targets]
        deviations = {t.name: _load_deviations(t) for t in targets}
        asked_points = config.getoption("--points")
        profile = points.load(asked_points) if asked_points else None
    except (ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from error
    asked = config.getoption("--level") or (profile or {}).get("level")
    levels = {t.name: asked or DEFAULT_LEVELS.get(t.name, "correct") for t in targets}
    transport = config.getoption("--transport")
    missing = hooks.needs() if transport == "sim" else []
    if missing:  # every clause that takes live ranks is judged all the same
        transport = "gloo"
    run = Run(targets, levels, transport, deviations, Worlds(transport), points=profile)
    if missing:
        run.notices.append(
            f"torch {torch.__version__} cannot be simulated, it lacks {', '.join(missing)}: judged "
            "on gloo instead of sim"
        )
    run.notices += [
        f"{which.name}: {PRETENDED_CUDA}"
        for which in targets
        if which.pretends_cuda and transport != "cuda"
    ]
    return run


def _load_deviations(which: target.Target) -> list[expectations.Deviation]:
    file = which.expectations
    return expectations.load(file) if file is not None and file.is_file() else []


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is judged."""
    run = config.stash[RUN]
    judged = ", ".join(f"{name} (level {level})" for name, level in run.levels.items())
    return [f"trainspec: judging {judged} on {run.transport}, torch {torch.__version__}"]


MOST_HANGS = 2
"""Cases of one clause and subject that may hang before the others are not run any more."""

QUICK_RANKS = TELLING_SIZE
"""`--quick` judges on no more ranks: to start them takes longer than most clauses."""

# ------------------------------------------------------------------------------- what is run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A clause becomes one test per implementation, function under test and world size."""
    clause = clause_of(metafunc.function)
    if clause is None:
        return
    run = metafunc.config.stash[RUN]
    names = [which.name for which in run.targets]
    metafunc.parametrize("target", run.targets, ids=names, indirect=True, scope="session")
    if clause.judges:
        metafunc.parametrize("subject", clause.judges)
    sizes = [f"w{size}" for size in clause.sizes]
    metafunc.parametrize("world", clause.sizes, ids=sizes, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark GPU clauses, drop what is above the level or not asked for."""
    run = config.stash[RUN]
    is_judge = Run.active is run and not _has_workers(config)
    if is_judge and not config.option.collectonly:
        _begin(config, run)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    patterns = _patterns(config)
    for item in items:
        clause = clause_of_item(item)
        if clause is not None and clause.transports == ("cuda",):
            item.add_marker(pytest.mark.gpu)
        (kept if _is_asked_for(item, clause, patterns, run) else dropped).append(item)
    if config.getoption("--quick"):
        few = _few(kept, run.quick)
        dropped += [item for item in kept if item not in few]
        kept = few
    if patterns and not any(clause_of_item(item) for item in kept):
        raise pytest.UsageError(_nothing_to_run(patterns, run))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    if config.getoption("--live"):
        # Nobody but the verdict reads of them. Not in a worker of xdist, which has no log.
        if config.getoption("--report-is-scratch") and run.log is not None:
            kept = outcome_hooks.left_out(kept, run)
        chapters = list(dict.fromkeys(item.path.parent for item in kept))
        kept.sort(key=lambda item: (chapters.index(item.path.parent), _level(item)))
    items[:] = kept


def _few(items: Sequence[pytest.Item], asked: Collection[str]) -> list[pytest.Item]:
    """Of each clause that is asked one case for each implementation and function."""
    kept: dict[tuple[str, ...], pytest.Item] = {}
    for item in items:
        clause = clause_of_item(item)
        if clause is None or clause.id not in asked:
            continue
        params = parameters_of(item)
        if params["world"] <= QUICK_RANKS:
            kept.setdefault((clause.id, params["target"].name, params.get("subject", "")), item)
    return [*kept.values()]


def _quick(config: pytest.Config, run: Run) -> set[str]:
    """The clauses of a quick run; notes for the verdict what they are worth."""
    highest = max(run.levels.values(), key=LEVELS.index)
    by_chapter: dict[str, set[str]] = {}
    for clause in _matching(_patterns(config) or ["*"]):
        if is_within(clause.level, highest):
            by_chapter.setdefault(clause.chapter, set()).add(clause.id)
    asked = {chapter: diagnosis.quick(chapter, own) for chapter, own in by_chapter.items()}
    worth = [f"{chapter} {found[-1].share:.0%}" for chapter, found in asked.items() if found]
    run.notices.append(
        "quick: of each chapter only those clauses were judged that reject most of its near-misses "
        f"in some seconds: {', '.join(worth)}"
    )
    return {each.clause for found in asked.values() for each in found}


def _patterns(config: pytest.Config) -> list[str]:
    """What `--clause` asks for: given several times, or with commas."""
    return [
        each for given in config.getoption("--clause") or () for each in given.split(",") if each
    ]


def _level(item: pytest.Item) -> int:
    """What is owed first is judged first."""
    clause = clause_of_item(item)
    return LEVELS.index(clause.level) if clause is not None else 0


def _is_asked_for(
    item: pytest.Item, clause: Clause | None, patterns: Sequence[str], run: Run
) -> bool:
    if clause is None:
        return not patterns
    level = run.levels[parameters_of(item)["target"].name]
    return clause.matches(patterns or "*") and is_within(clause.level, level)


def _matching(patterns: Sequence[str]) -> list[Clause]:
    return [clause for clause in ledger.load_all() if clause.matches(patterns)]


def _nothing_to_run(patterns: Sequence[str], run: Run) -> str:
    """Why no clause is left: its level, the paths that pytest was given, or a name."""
    asked = ", ".join(patterns)
    meant = _matching(patterns)
    if meant:
        highest = max(run.levels.values(), key=LEVELS.index)
        above = {c.level for c in meant if not is_within(c.level, highest)}
        if not above:
            return f"--clause {asked}: no such clause is in the given paths"
        judged = ", ".join(f"{name} at {level}" for name, level in run.levels.items())
        found = "; ".join(
            f"level {level}: {', '.join(c.id for c in meant if c.level == level)}"
            for level in LEVELS
            if level in above
        )
        needed = max(above, key=LEVELS.index)
        return f"--clause {asked} lies above the level ({judged}): {found}; add --level {needed}"
    ids = [clause.id for clause in ledger.load_all()]
    near = get_close_matches(patterns[0], ids, n=3, cutoff=0.4)
    hint = f"; close to it: {', '.join(near)}" if near else ""
    return f"--clause {asked}: no clause id matches{hint}. All ids are in spec_tests/CLAUSES.md"


# ---------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session", name="target")
def _target(request: pytest.FixtureRequest) -> target.Target:
    """The implementation that is judged."""
    which: target.Target = request.param
    return which


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Worlds:
    """All live worlds of this process; for tests of the rig itself."""
    return request.config.stash[RUN].worlds


@pytest.fixture
def world(request: pytest.FixtureRequest, target: target.Target) -> Iterator[World]:
    """Live ranks, as many as the clause asks for, with the implementation loaded."""
    run = request.config.stash[RUN]
    clause = clause_of(request.function)
    if clause is None:
        raise RigError("the fixture `world` belongs to clauses; a test of the rig takes `worlds`")
    transport = clause.transport_on(run.transport)
    if transport not in clause.transports:
        needed = " or ".join(clause.transports)
        raise unittest.SkipTest(f"{NOT_HERE}observed on {needed}, this run is on {transport}")
    if transport == "cuda" and not torch.cuda.is_available():
        raise unittest.SkipTest(f"{NOT_HERE}needs a CUDA device")
    runner.require_simulable(transport)
    params = request.node.callspec.params
    hung = run.hung.get((target.name, clause.id, params.get("subject")), [])
    if len(hung) >= MOST_HANGS:  # each takes seconds, and hardly ever says another thing
        raise unittest.SkipTest(f"not run: the clause hung already, in {' and '.join(hung)}")
    found = run.worlds.world(request.param, target, transport=transport)
    runner.require_offered(found, clause, params.get("subject"))
    yield found
    if request.config.getoption("--fresh"):
        run.worlds.drop(target)


# ----------------------------------------------------------------------------------- session


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what is judged; begin, but where clauses are to be collected first."""
    config, run = session.config, session.config.stash[RUN]
    if config.getoption("--quick"):
        run.quick = _quick(config, run)
    if is_worker(config):
        return
    Run.active = run
    if config.option.collectonly:
        return
    patterns = _patterns(config)
    if patterns and _has_workers(config) and not _matching(patterns):
        raise pytest.UsageError(_nothing_to_run(patterns, run))  # xdist's workers cannot say it
    live.register(config)
    if _has_workers(config):  # they collect, and this process does not
        _begin(config, run)


def _has_workers(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "dist", "no") != "no")


def _begin(config: pytest.Config, run: Run) -> None:
    """See that every implementation loads, and open the log; ranks have started meanwhile."""
    if config.getoption("--impl"):
        for which in run.targets:
            _require_loads(which, run)
    directory = config.getoption("--report")
    if directory:
        is_kept = not config.getoption("--report-is-scratch")
        # All chapters: half a second, which a run that is about one of them need not wait.
        clauses = ledger.load_all() if is_kept or run.points is not None else []
        if is_kept:
            # Late: it takes a second, which whoever waits for a failed import need not wait.
            from spec_tests import museum

            stories = museum.stories()
            run.told = {c.id: ledger.told(c, stories.get(c.id, [])) for c in clauses}
        run.log = EventLog(
            Path(directory, "events.jsonl"),
            level=config.getoption("--level") or "correct",
            levels=run.levels,
            implementations=[which.name for which in run.targets],
            transport=run.transport,
            profile=config.getoption("--profile"),
            seed=0,
            ledger=ledger.fingerprint(clauses),
            **({"notices": run.notices} if run.notices else {}),
            **_resolved_points(run, clauses),
        )


def _resolved_points(run: Run, clauses: Sequence[Clause]) -> dict[str, Any]:
    if run.points is None:
        return {}
    try:
        return {"points": points.resolve(run.points, [c.id for c in clauses if c.strength == MUST])}
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _require_loads(which: target.Target, run: Run) -> None:
    try:
        error = run.worlds.pool(1, which, run.transport).load_error
        if error is not None and error.is_a(target.OffersNothingError.__name__):
            raise pytest.UsageError(f"--impl {which.name}: {error.message}")
        is_lacking = error is not None and error.is_a("NotHere")
        reason = (error.message if is_lacking else error.text) if error is not None else ""
    except (RankDied, RankHung) as failure:
        reason = str(failure)
    if reason:
        raise pytest.UsageError(
            f"--impl {which.name}: expected an implementation that loads, but importing it failed\n"
            f"{reason}"
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no rank behind, however the run ended."""
    if RUN in config.stash:
        config.stash[RUN].worlds.close()
