"""One clause, one implementation, one situation: how it is called and what it came to.

pytest runs the clauses (`rig/plugin.py`); impostors and the matrix run them without pytest,
hundreds of times in one process. Both go through this file, so that they cannot come to different
verdicts.
"""

from __future__ import annotations

import re
import shlex
import time
import traceback
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis.errors import Flaky

from spec_tests.contract import skeletons
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import (
    SITUATION,
    Situation,
    Violation,
    judging,
    unreadable_is_a_finding,
    violated,
)
from spec_tests.rig.outcomes import LEVELS, Outcome
from spec_tests.rig.ranks.errors import (
    NOT_HERE,
    Blocked,
    NotOffered,
    RankDied,
    RankHung,
    RankRaised,
    RankReport,
    RigError,
)
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.sim import Deadlock, hooks
from spec_tests.rig.target import PACKAGE_ROOT, Target

DEFAULT_TRANSPORT = "gloo"

MODES = {
    "CollectiveMismatch": "mismatch",
    "UnwaitedWork": "un-waited",
    "BufferInFlight": "buffer in flight",
}


@dataclass(frozen=True)
class CaseResult:
    """What one case came to; `mode` says how it was noticed, see `mode_of`."""

    clause: Clause
    case: str
    outcome: Outcome
    message: str
    duration_s: float
    margins: tuple[dict[str, float], ...]
    mode: str = ""


def situation(
    clause: Clause,
    target: Target,
    case: Mapping[str, Any],
    given: str,
    *,
    transport: str = DEFAULT_TRANSPORT,
) -> Situation:
    """What a violation of `clause` in a run on `transport` will say about itself."""
    return Situation(
        clause=clause.id,
        sentence=clause.sentence,
        implementation=target.name,
        case=given,
        world_size=int(case["world"]),
        rerun=f"python -m spec_tests --impl {shlex.quote(target.name)} --clause {clause.id}"
        + (" --level production" if clause.level == LEVELS[-1] else "")
        + (f" --transport {transport}" if transport != DEFAULT_TRANSPORT else "")
        + (" --pretend-cuda" if target.pretends_cuda and target.layout is None else ""),
        source=clause.source,
        where=clause.where,
        subject=case.get("subject") or ", ".join(clause.needs),
        is_learning=skeletons.is_one(target.path),
    )


def outcome_of(error: BaseException | None) -> Outcome:
    """The outcome that an exception (or none) stands for."""
    if error is None:
        return Outcome.PASSED
    if isinstance(error, NotOffered):
        return Outcome.NOT_OFFERED
    if isinstance(error, Blocked):
        return Outcome.BLOCKED
    if isinstance(error, RankHung):
        return Outcome.HANG
    if isinstance(error, RankDied):
        return Outcome.DIED
    if isinstance(error, unittest.SkipTest):
        return Outcome.NOT_HERE if str(error).startswith(NOT_HERE) else Outcome.SKIPPED
    if isinstance(error, AssertionError | RankRaised):
        return Outcome.FAILED
    if isinstance(error, Flaky):
        # The same input passed and failed: a race is a fault of what is judged.
        return Outcome.FAILED
    return Outcome.ERROR


def mode_of(error: BaseException | None) -> str:
    """How a fault was noticed: "assertion", "deadlock", "mismatch", ...; "" if there is none."""
    if isinstance(error, RankHung):
        return "deadlock" if isinstance(error, Deadlock) else "hang"
    if isinstance(error, RankDied):
        return "death"
    if isinstance(error, RankRaised):
        return MODES.get(error.error.kind, error.error.kind)
    return "assertion" if isinstance(error, AssertionError) else ""


def message_of(error: BaseException | None) -> str:
    """What the log says about an exception: complete where it is a violation, else with a trace."""
    if error is None:
        return ""
    notes = list(getattr(error, "__notes__", ()))  # the values that hypothesis drew
    if isinstance(error, Violation):
        return "\n".join([str(error), *notes])
    text, likely = str(error) or repr(error), ""
    if isinstance(error, RankRaised):
        text += f"\n{error.error.text.rstrip()}"
        likely = next((means for words, means in _WORDS.items() if words in text), "")
    elif isinstance(error, RankDied | RankHung):
        likely = _parted(error.ranks)
    elif outcome_of(error) is Outcome.ERROR and not isinstance(error, RigError):
        text = "".join(traceback.format_exception(error))
    if SITUATION.get().is_learning:
        text = _OF_OTHERS.sub("", text)
    return "\n".join([str(violated(text, likely=likely)), *notes])


# A line of a traceback or stack and what is shown below it, unless it is of the learner's own file.
_FOREIGN = rf'(?:{re.escape(str(PACKAGE_ROOT))}/|<|[^"]*(?:site-packages|/lib/python3))[^"]*'
_OF_OTHERS = re.compile(rf'^( *)File "{_FOREIGN}", line \d+, in .*\n(?:\1  .*\n?)*', re.MULTILINE)


def _parted(ranks: Sequence[RankReport]) -> str:
    """The first collective of which two ranks issued another one, among the last that are known."""
    seen: dict[str, tuple[str, int]] = {}
    for report in ranks:
        for issued in report.collectives:
            what, _, at = issued.rpartition(" #")
            if what.startswith(("send", "recv")):
                continue
            other, rank = seen.setdefault(at, (what, report.rank))
            if other != what:
                number = at.partition(" ")[0]
                return (
                    f"the ranks' collectives differ from #{number} on: {other} on rank {rank}, "
                    f"{what} on rank {report.rank}"
                )
    return ""


# What some errors of PyTorch mean in code that frees and gathers storage by itself.
_FREED = "the storage was freed, and not gathered again before this use"
_WORDS = {
    "which is out of bounds for storage of size 0": _FREED,
    "setStorage": _FREED,
    "got mixed torch.Tensor and DTensor": "one call got sharded and plain tensors together",
}


def require_offered(world: World, clause: Clause, subject: str | None) -> None:
    """See that the implementation brings what this case needs, before anything is judged.

    Raises:
        NotOffered: a function is missing.
        Blocked: a function does not fit the contract: one fault, not one per clause.
    """
    offered = world.offered()
    wanted = [*([subject] if subject else []), *clause.needs]
    missing = [function for function in wanted if function not in offered]
    if missing:
        raise NotOffered(f"not offered: {', '.join(missing)}")
    misfits = world.misfits()
    reasons = [misfits[function] for function in wanted if function in misfits]
    if reasons:
        raise Blocked("\n".join(reasons))


def require_simulable(transport: str) -> None:
    """See that ranks can be simulated, where they are to be.

    Raises:
        unittest.SkipTest: this torch lacks a hook; says which.
    """
    missing = hooks.needs() if transport == "sim" else []
    if missing:
        raise unittest.SkipTest(f"{NOT_HERE}torch {torch.__version__} lacks {', '.join(missing)}")


def run_case(
    clause: Clause,
    target: Target,
    case: Mapping[str, Any],
    worlds: Worlds,
    *,
    transport: str | None = None,
) -> CaseResult:
    """Judge one case, without pytest.

    Args:
        transport: where, whatever the clause says; live ranks then ignore schedules.
    """
    name = clause.label(case)
    outcome, message, mode = Outcome.PASSED, "", ""
    begun = time.perf_counter()
    asked = transport or worlds.transport
    with judging(situation(clause, target, case, name, transport=asked)) as here:
        try:
            chosen = transport or clause.transport_on(worlds.transport)
            require_simulable(chosen)
            world = worlds.world(int(case["world"]), target, transport=chosen)
            if transport is not None:
                world = replace(world, is_replay=True)
            require_offered(world, clause, case.get("subject"))
            with unreadable_is_a_finding():
                clause.test(**{**case, "world": world})
        except KeyboardInterrupt:
            raise
        except BaseException as caught:  # hangs and deaths are no ordinary exceptions
            outcome, message, mode = outcome_of(caught), message_of(caught), mode_of(caught)
    return CaseResult(
        clause, name, outcome, message, time.perf_counter() - begun, tuple(here.margins), mode
    )
