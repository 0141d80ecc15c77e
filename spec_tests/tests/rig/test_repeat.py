"""A failed case is run once more, and what differs from run to run is the whole finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spec_tests import impls
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import Violation, repeat
from spec_tests.rig.ledger import load_all
from spec_tests.rig.ranks.errors import DIFFERS
from spec_tests.rig.ranks.world import Worlds

CLAUSES = {clause.id: clause for clause in load_all()}
MEAN = CLAUSES["ddp.gradients.mean"]
CASE = {"subject": "ddp", "situation": "mlp: backward 0"}

DDP = """
import torch.distributed as dist

calls, works = [], []


def ddp(module, *, process_group=None):
    calls.append(module)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return module


def reduce(parameter):
    REDUCE


def finish_gradient_synchronization(wrapped):
    while works:
        works.pop().wait()
"""
# Doubled, so that it is wrong whenever the division comes.
DIVIDED_IN_FLIGHT = """
    parameter.grad *= 2
    works.append(dist.all_reduce(parameter.grad, async_op=True))
    parameter.grad /= dist.get_world_size()
"""
SUMMED = "works.append(dist.all_reduce(parameter.grad, async_op=True))"
COUNTED = "parameter.grad *= len(calls)"


def found(
    worlds: Worlds, folder: Path, reduce: str, clause: Clause = MEAN, **case: Any
) -> Exception:
    """What a clause says of DDP with this hook, after a second run."""
    mine = folder / "mine.py"
    mine.write_text(DDP.replace("REDUCE", reduce.strip()), encoding="utf-8")
    world = worlds.world(3, impls.parse(str(mine)))
    case = case or CASE
    telling = repeat.Repeats().telling(clause, {**case, "world": 3}, world)
    with pytest.raises(Exception) as caught, telling:
        clause.test(world=world, **case)
    return caught.value


def test_what_is_written_in_flight_differs_and_simulated_ranks_prove_it(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Whether two runs differ is chance on live ranks; that they do is given here.
    runs = iter(["[x]  Y.\nrank 1, 'b' (3,): expected z\nlargest error 5 at (0,)"])
    monkeypatch.setattr(repeat, "_run", lambda *_: next(runs))
    said = str(found(worlds, tmp_path, DIVIDED_IN_FLIGHT)).splitlines()
    assert said[1] == DIFFERS
    assert said[2].startswith("one run: rank 0, '")
    assert said[2].endswith("another: rank 1, 'b' (3,) is off by 5")
    assert "on simulated ranks: " in said[3]
    assert "wrote to a buffer that will receive the result" in said[3]
    assert [line[:7] for line in said[4:]] == ["given: "], "no other story"


def test_what_is_the_same_twice_is_told_as_before(worlds: Worlds, tmp_path: Path):
    said = str(found(worlds, tmp_path, SUMMED))
    assert "likely: summed and not divided by the world size" in said
    assert "differs" not in said


def test_state_that_changes_from_call_to_call_is_no_race(worlds: Worlds, tmp_path: Path):
    """Its second run differs as well, and on fresh ranks in the same way."""
    said = str(found(worlds, tmp_path, COUNTED))
    assert "expected the mean gradient" in said
    assert "differs" not in said


def test_a_property_is_run_again_with_the_values_that_it_was_drawn(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def run(clause: Clause, _: Any, case: dict[str, Any], __: Any) -> None:
        seen.append((clause.test, case))

    monkeypatch.setattr(repeat, "_run", run)
    clause = CLAUSES["ddp.gradients.mean-at-any-seed"]
    said = str(found(worlds, tmp_path, SUMMED, clause, subject="ddp"))
    assert "summed and not divided" in said
    ((test, case),) = seen
    assert test is not clause.test
    assert {"seed", "toy", "subject", "world"} == {*case}
    assert case["world"] == 3


def test_one_case_of_a_clause_is_run_once_more():
    repeats, function = repeat.Repeats(), (impls.parse("plain"), "ddp")
    wrong = Violation("x", {"wrong": {"name": "a", "shape": [], "ranks": {}}})
    assert [repeats._may_try(wrong, MEAN, function) for _ in range(2)] == [True, False]
    assert not repeats._may_try(Violation("no tensor"), MEAN, function)
    repeats.known[function] = DIFFERS
    assert repeats._may_try(wrong, MEAN, function)
