"""What ranks return is foreign: no clause may take it for granted, and none may stop at it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.contract import FUNCTIONS
from spec_tests.programs.laws import stream
from spec_tests.rig import judge, ledger, shards, target
from spec_tests.rig.judge import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import RigError
from spec_tests.rig.ranks.world import Ranks, World, Worlds
from spec_tests.tests.rig.helpers import judged

OBSERVATIONS = {
    "None": None,
    "an empty tuple": (),
    "an exception": ValueError("no"),
    "a tensor": torch.zeros(3),
    "another dict": {"x": [torch.zeros(2)]},
}


class _Returning(World):
    """Ranks that run nothing, offer everything, and return the same whatever they are asked."""

    def run(self, body: Any, *args: Any, **options: Any) -> Ranks:
        value = self.worlds.value  # type: ignore[attr-defined]  # see _AllReturning
        judge.SITUATION.get().observed = ranks = Ranks([value] * self.size)
        return ranks

    def offered(self) -> tuple[str, ...]:
        return tuple(FUNCTIONS)

    def misfits(self) -> dict[str, str]:
        return {}


class _AllReturning(Worlds):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def world(
        self, size: int, target: target.Target | None = None, *, transport: str | None = None
    ) -> World:
        """Such ranks, wherever they are asked for."""
        return _Returning(self, size, target, transport or "gloo")


@pytest.mark.parametrize("value", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_no_clause_stops_at_what_ranks_return(value: object):
    worlds, which = _AllReturning(value), impls.parse("solution")
    found: Counter[Outcome] = Counter()
    for clause in ledger.load_all():
        result = judged(which, worlds, clause, next(clause.cases()))
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
    assert "read in test_unreadable.py:" in said
    assert "raise error" in said
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


@pytest.mark.parametrize(("first", "words"), [(shards.STRIDE, "but others"), (1, "offsets")])
def test_what_is_wrong_with_a_batch_of_no_rank_is_said(first: int, words: str):
    wanted = stream.expected([9], sequence_length=2, batch_size=1, world_size=1)
    got = [stream.batch_of([first], 2)]
    with pytest.raises(judge.Violation, match=words):
        stream.same([got], wanted)
