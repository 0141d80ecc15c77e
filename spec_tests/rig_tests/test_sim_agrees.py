"""What the simulated world computes is what gloo computes."""

from itertools import chain

import pytest
import torch

from spec_tests.rig.sim import Schedule
from spec_tests.rig.sim.hooks import needs
from spec_tests.rig.world import Worlds
from spec_tests.rig_tests import programs


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_agree_with_gloo(worlds: Worlds, size: int):
    # Thousands of them: python -m spec_tests.rig_tests
    for batch in programs.batches(0, 2 * programs.BATCH, size):
        sim, gloo = worlds.world(size, transport="sim"), worlds.world(size)
        assert programs.disagreements(batch, sim, gloo) == []


def test_the_pinned_programs_use_every_operation():
    drawn = [p for batch in programs.batches(0, 2 * programs.BATCH, 2) for p in batch]
    used = {statement.operation for program in drawn for statement in program.statements}
    assert used == programs.OPERATIONS.keys()
    assert {program.is_exact for program in drawn} == {True, False}


@pytest.mark.parametrize(
    "schedule",
    [Schedule("reversed"), Schedule("seeded", seed=1), Schedule(reduce_order="ring", straggler=0)],
    ids=str,
)
def test_no_program_depends_on_the_schedule(worlds: Worlds, schedule: Schedule):
    sim = worlds.world(3, transport="sim")
    (batch,) = programs.batches(0, programs.BATCH, 3)
    first, second = sim.run(programs.run, batch), sim.scheduled(schedule).run(programs.run, batch)
    for rank in range(3):
        for program, a, b in zip(batch, first[rank], second[rank], strict=True):
            if program.is_exact:
                pairs = zip(chain(*a), chain(*b), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), program


class Fixed:
    """A world that always observes the same."""

    size = 1

    def __init__(self, *values: float) -> None:
        self._tensors = [[torch.tensor(value)] for value in values]

    def run(self, *args: object) -> list[object]:
        return [[self._tensors]]


def test_a_disagreement_is_told():
    (batch,) = programs.batches(0, 1, 2)
    assert programs.disagreements(batch, Fixed(1.0, 2.0), Fixed(1.0, 2.0)) == []  # type: ignore[arg-type]  # stands for a world
    (told,) = programs.disagreements(batch, Fixed(1.0, 2.0), Fixed(1.0, 3.0))  # type: ignore[arg-type]  # likewise
    assert told.startswith("rank 0 of 1, statement 1 of Program(seed=0")


def test_a_torch_without_a_hook_is_not_simulated(monkeypatch: pytest.MonkeyPatch):
    assert needs() == []
    monkeypatch.delattr(torch._C._distributed_c10d, "FakeProcessGroup")
    assert needs() == ["..._distributed_c10d.FakeProcessGroup"]
