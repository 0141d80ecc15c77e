"""Functions that the tests of the rig share; see `conftest` for fixtures, `bodies` for ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spec_tests.chapters.ddp import test_gradients
from spec_tests.impls import parse
from spec_tests.rig import ledger
from spec_tests.rig.clause import Clause, clause_of
from spec_tests.rig.judge.runner import CaseResult, run_case
from spec_tests.rig.outcomes import LEVELS
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import Target
from spec_tests.tests.reference import launch

ROOT = Path(__file__).parents[3]
CHECKOUTS = Path(__file__).parent / "checkouts"


def declared(test: Callable[..., None]) -> Clause:
    """Return the clause that a test is declared as."""
    found = clause_of(test)
    assert found is not None
    return found


def clause_named(id: str) -> Clause:
    """Return the clause of an id."""
    (found,) = [clause for clause in ledger.load_all() if clause.id == id]
    return found


MEAN = declared(test_gradients.test_mean)
MEAN_CASE = {"world": 2, "subject": "ddp", "situation": "mlp: backward 0"}
RIGHT = """\
from torch.nn.parallel import DistributedDataParallel
def ddp(module, *, process_group=None):
    return DistributedDataParallel(module, process_group=process_group)
def no_sync(wrapped):
    return wrapped.no_sync()
"""
"""An implementation of a user's own that is as it should be."""
RIGHT_BESIDE = parse("torch")
"""Right, and living on in the same worlds while others come and go."""
UNANSWERED = "(did not answer: "
"""Begins what is said in place of a stack."""
PROMPT_S, HANG_S = 2.0, 5.0
"""How soon a rank that raised or died is to be reported, and one that hangs."""


def calling(statement: str) -> str:
    """Return an implementation whose ddp does this."""
    return f"import os, sys, time\nimport torch\ndef ddp(module):\n    {statement}\n"


def judged(
    which: Target,
    worlds: Worlds,
    test: Clause | Callable[..., None] | str = MEAN,
    case: Mapping[str, Any] | None = None,
    **options: Any,
) -> CaseResult:
    """Return what one case of a clause says of an implementation.

    Args:
        test: the clause, its id, or the test that is declared as one; `ddp.gradients.mean` by
            default.
        case: what the case has, of which the clause's first is taken; or one that is not its own.
            `MEAN_CASE` by default for that clause.
    """
    clause = clause_named(test) if isinstance(test, str) else test
    clause = clause if isinstance(clause, Clause) else declared(clause)
    asked = (MEAN_CASE if clause is MEAN else {}) if case is None else case
    own = (each for each in clause.cases() if asked.items() <= each.items())
    return run_case(clause, which, next(own, asked), worlds, **options)


def clauses(chapter: str, level: str = LEVELS[-1]) -> list[Clause]:
    """Return the clauses of a chapter up to a level that live ranks on a CPU can judge."""
    return [
        clause
        for clause in ledger.load_all()
        if clause.chapter == chapter
        and "gloo" in clause.transports
        and LEVELS.index(clause.level) <= LEVELS.index(level)
    ]


def python(
    *arguments: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a module (`-m`) or a program's text (`-c`) in a folder, and return how it ended.

    It is forked from a process that has imported torch, gets none of pytest's variables (a run
    within a worker of xdist would take itself for one), and does not see what a test has put in
    `os.environ`.
    """
    _, module, *words = arguments
    with tempfile.TemporaryDirectory(prefix="trainspec-") as scratch:
        name = f"{scratch}/command"
        command = launch.start(module, words, folder=cwd, environment=environment, name=name)
        try:
            ended = command.wait(500)
        finally:
            command.close()
    return subprocess.CompletedProcess([*arguments], ended.status, ended.out, ended.err)


def forked(command: list[str], *, cwd: Path = ROOT, **_: object) -> Any:
    """Stand in for `subprocess.run` of this Python, without the import of torch."""
    return python(*command[1:], cwd=cwd)


ADAPTERS_2025 = """\
import importlib.metadata
from cs336_systems.ddp import OverlappedDDP

VERSION = importlib.metadata.version("cs336-systems")


class BucketedDDP(OverlappedDDP):
    has_begun = False

    def start(self):
        self.has_begun = True

    def reduce(self, parameter):
        assert self.has_begun, "nobody has started this batch"
        super().reduce(parameter)

    def end(self):
        self.finish()
        self.has_begun = False

def get_ddp_individual_parameters(module):
    return OverlappedDDP(module)

def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()

def get_ddp_bucketed(module, bucket_size_mb):
    return BucketedDDP(module)

def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    ddp_model.end()

def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()
"""
"""The adapters of 2025, as far as a student has come; `start` must come before each batch."""


def checkout_of_2025(folder: Path) -> str:
    """Write a checkout with the adapters of 2025 and return how `--impl` names it."""
    shutil.copytree(CHECKOUTS / "cs336_2026", folder)
    (folder / "tests" / "adapters.py").write_text(ADAPTERS_2025)
    return f"cs336:{folder}"


def faulty_checkout(folder: Path) -> str:
    """Write a checkout with faults that the course's own tests let pass; return its `--impl`.

    DDP averages the weights, and gradients stay local. FSDP and the optimizer divide nothing.
    """
    shutil.copytree(CHECKOUTS / "cs336_2026", folder)
    reduced = "parameter.grad, async_op=True", "parameter.data, async_op=True"
    divided = "parameter.grad /= dist", "parameter.data /= dist"
    replaced(folder / "cs336_systems" / "ddp.py", reduced, divided)
    replaced(folder / "cs336_systems" / "fsdp.py", ("Linear | Embedding", "()"))
    plain = "ShardedOptimizer(params, optimizer_cls, **kwargs)", "optimizer_cls(params, **kwargs)"
    replaced(folder / "tests" / "adapters.py", plain)
    return f"cs336:{folder}"


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            found.append(pid)
    return found


def within(timeout_s: float, is_so: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def replaced(path: Path, *changes: tuple[str, str]) -> None:
    """Replace pieces of a file, each of which must be in it exactly once."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"expected {old!r} once in {path}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
