"""What code does, and what that comes to: an outcome with words for its clause, and no more.

Each row is an implementation that is right or wrong in one way. Whatever it does, who is judged
beside it in the same worlds is judged as ever. What ranks return is foreign: no clause may take it
for granted, and none may stop at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from spec_tests import impls
from spec_tests.contract import FUNCTIONS
from spec_tests.rig import judge, ledger
from spec_tests.rig.judge import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import RigError
from spec_tests.rig.ranks.world import Ranks, World, Worlds
from spec_tests.tests.rig.helpers import MEAN_CASE, RIGHT_BESIDE, UNANSWERED, calling, judged

DIED, FAILED, HANG, NOT_HERE, NOT_OFFERED, PASSED = (
    *(Outcome.DIED, Outcome.FAILED, Outcome.HANG),
    *(Outcome.NOT_HERE, Outcome.NOT_OFFERED, Outcome.PASSED),
)


class Row(NamedTuple):
    """An implementation, the outcome, words of the message, the clause and what its case has."""

    text: str
    outcome: Outcome
    said: tuple[str, ...] = ()
    clause: str = "ddp.gradients.mean"
    case: Mapping[str, object] = MEAN_CASE


CALLS = {
    "crashes": ("import ctypes; ctypes.string_at(0)", DIED, "killed by SIGSEGV"),
    "recurses": ("return ddp(module)", FAILED, "raised RecursionError"),
    "sleeps": ("time.sleep(1000)", HANG, "time.sleep(1000)"),
    "long words": ("raise ValueError('x' * 10**7)", FAILED, "characters left out"),
    "left open": ("raise NotImplementedError(module)", NOT_OFFERED, "not offered: ddp"),
}
"""What `ddp` does."""

LAZY = """
def ddp(module, *, process_group=None):
    import no_such_package.part
def flash_attention(q, k, v, **options):
    import no_such_package.part
"""
LOADER = """
def token_loader(paths, *, batch_size, sequence_length, rank=0, world_size=1):
    {}
    return iter(())
"""
LOADERS = {
    "raises on one rank": ("if rank: raise ValueError('no second')", "raised ValueError: no seco"),
    "is empty": ("return []", "expected batches, got none on ranks [0, 1]"),
    "prints what it catches": ("print('no')", "ranks [0, 1]; the last line that it printed: no"),
}
WORKERS = """
from torch.utils.data import DataLoader
from spec_tests import impls, plain

def token_loader(paths, **options):
    batches = list(plain.token_loader(paths, **options))
    return DataLoader(batches, batch_size=None, num_workers=2)
"""
SHARED = """
from spec_tests import plain

def token_loader(paths, **how):
    return [(x - 2 * how["rank"], y - 2 * how["rank"]) for x, y in plain.token_loader(paths, **how)]
"""
MOVED = """
import torch
from torch.nn.parallel import DistributedDataParallel

def ddp(module, *, process_group=None):
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.data = part.view(parameter.shape)
    {}
    return DistributedDataParallel(module)
"""
TWICE = "module.kept = [torch.zeros_like(flat), torch.zeros_like(flat)]"
RESULT = """
import torch.distributed as dist
from spec_tests.plain import *

def finish_gradient_synchronization(wrapped):
    for parameter in wrapped.parameters():
        if parameter.grad is not None:
            work = dist.all_reduce(parameter.grad, async_op=True)
            work.wait()
            parameter.grad = work.result()[0] / dist.get_world_size()

def ddp(module, *, process_group=None):
    return module
"""
WINDOW, ORDER = "data.partition.ranks-change-shard-together", "data.partition.sequences-in-order"
ZEROS = """
import torch
from spec_tests import plain

def build_trainer(module, make, **options):
    trainer = plain.build_trainer(module, make, **options)
    step = trainer.optimizer.step

    def on_zeros():
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        step()

    trainer.optimizer.step = on_zeros
    return trainer
"""
TWICE_FREED = "libc.malloc.restype = p = ctypes.c_void_p; a = p(libc.malloc(9)); " + (
    "libc.free(a); libc.free(a)"
)
SCATTERED = "reduce_scatter(parameter.grad.clone(), [parameter.grad] * dist.get_world_size()"
INSTALL = "python -m pip install no_such_package"
ROWS = {
    **{name: Row(calling(does), outcome, (said,)) for name, (does, outcome, said) in CALLS.items()},
    "a missing package": Row(LAZY, NOT_HERE, ("\nnot here: ", INSTALL, "(mine.py:3)")),
    "a missing part of its own": Row(LAZY.replace("no_such_package", "mine_too"), FAILED),
    "a missing package is no refusal": Row(
        *(LAZY, NOT_HERE, (INSTALL,), "attention.refusal.bad-input"),
        {"subject": "flash_attention", "case": "none"},
    ),
    "a future's result": Row(RESULT, PASSED),
    "a future's result, simulated": Row(RESULT, PASSED, (), "ddp.schedule.same-gradients", {}),
    "a result that gloo lacks, simulated": Row(
        RESULT.replace("all_reduce(parameter.grad", SCATTERED),
        *(NOT_HERE, ("gloo implements no result() of",), "ddp.schedule.same-gradients", {}),
    ),
    **{
        f"a loader that {name}": Row(LOADER.format(statement), FAILED, (said,), WINDOW, {})
        for name, (statement, said) in LOADERS.items()
    },
    "a loader that begins within the part of another rank": Row(
        SHARED,
        FAILED,
        (
            "\ntoken id 4 is in row 1 of batch 0 of rank 0 and in row 0 of batch 0 of rank 1\n"
            "likely: ranks 0 and 1 read the same tokens\n",
        ),
        *("data.partition.ranks-differ", {}),
    ),
    "a loader with workers": Row(WORKERS, PASSED, (), ORDER, {}),
    "a module that was moved": Row(MOVED.format("pass"), PASSED, (), "ddp.footprint.gradients", {}),
    "a module that was moved, and copied twice": Row(
        MOVED.format(TWICE), FAILED, (), "ddp.footprint.gradients", {}
    ),
    "a heap that is damaged": Row(
        calling(f"import ctypes; libc = ctypes.CDLL(None); {TWICE_FREED}"),
        DIED,
        ("killed by SIGABRT\nlikely: native code read or wrote memory that is not its own",),
    ),
    "no module": Row(
        "def ddp(module, *, process_group=None):\n    pass\n",
        FAILED,
        ("AttributeError: expected a module, which has parameters, got NoneType",),
        *("ddp.construction.is-a-module", {}),
    ),
    "a trainer that decays frozen weights": Row(
        ZEROS,
        FAILED,
        ("likely: weight decay or momentum was applied to a parameter without a gradient",),
        *("trainer.parameters.frozen", {"subject": "build_trainer"}),
    ),
    "a trainer without step": Row(
        "def build_trainer(*args, **options):\n    return object()\n",
        FAILED,
        ("AttributeError: expected a trainer or an optimizer, which has step, got object",),
        *("trainer.parameters.tied", {}),
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_code_does_is_a_result_for_its_clause(module_worlds: Worlds, mine, row: Row):
    mine("", "mine_too/__init__.py")
    found = judged(which := mine(row.text), module_worlds, row.clause, row.case)
    module_worlds.drop(which)
    assert found.outcome is row.outcome, found.message
    for said in row.said:
        # On a crowded machine the rank may have no processor to say in time where it is.
        is_late = row.outcome is HANG and UNANSWERED in found.message
        assert said in found.message or is_late, found.message
    assert len(found.message) < 100_000
    beside = judged(RIGHT_BESIDE, module_worlds)
    assert beside.outcome is PASSED, "as if nothing had happened beside it"


# -------------------------------------------------------------------------------- what ranks return


@pytest.mark.parametrize("value", [None, {"x": [torch.zeros(2)]}], ids=["None", "another dict"])
def test_no_clause_stops_at_what_ranks_return(monkeypatch: pytest.MonkeyPatch, value: object):
    """Ranks run nothing, offer everything, and return the same whatever they are asked."""

    def run(world: World, body: Any, *args: Any, **options: Any) -> Ranks:
        judge.SITUATION.get().observed = ranks = Ranks([value] * world.size)
        return ranks

    monkeypatch.setattr(World, "run", run)
    monkeypatch.setattr(World, "offered", lambda world: tuple(FUNCTIONS))
    monkeypatch.setattr(World, "misfits", lambda world: {})
    worlds, which = Worlds(), impls.parse("solution")
    found: Counter[Outcome] = Counter()
    for clause in ledger.load_all():
        result = judged(which, worlds, clause)
        found[result.outcome] += 1
        assert result.outcome is not Outcome.ERROR, f"{clause.id}: {result.message}"
    assert found[Outcome.FAILED] > 0.9 * found.total(), found


def finding_about(observed: list[Any], error: Exception) -> str:
    """What is said when a clause stops with this error over these observations."""
    here = judge.Situation(clause="ddp.gradients.mean", observed=observed)
    with (
        pytest.raises(judge.Violation) as caught,
        judge.judging(here),
        judge.unreadable_is_a_finding(),
    ):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_the_finding_shows_what_every_rank_returned_and_where_it_was_read():
    error = TypeError("'NoneType' object is not iterable")
    error.add_note("Falsifying example: length=3")
    said = finding_about([{"grad": torch.zeros(2, 3)}, None], error)
    assert "cannot read: TypeError: 'NoneType' object is not iterable" in said
    assert "rank 0 returned {'grad': <tensor (2, 3) float32>}\nrank 1 returned None" in said
    assert "read in test_what_code_comes_to.py:" in said
    assert error.__notes__ == ["Falsifying example: length=3"]
    assert "every rank returned ()" in finding_about([(), ()], error)
    assert len(finding_about([["x" * 10**6] * 10**3], error)) < 2000


@pytest.mark.parametrize(
    ("error", "observed"),
    [
        (RigError("the rig"), [None]),
        (OSError("no space left on device"), [None]),
        (MemoryError(), [None]),
        (TypeError("before any rank was asked"), None),
    ],
)
def test_what_the_rig_or_the_machine_is_at_fault_for_stays_an_error(error, observed):
    with (
        pytest.raises(type(error)) as caught,
        judge.judging(judge.Situation(observed=observed)),
        judge.unreadable_is_a_finding(),
    ):
        raise error
    assert runner.outcome_of(caught.value) is Outcome.ERROR
