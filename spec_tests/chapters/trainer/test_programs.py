"""Programs: any situation of a trainer, in any order of its calls."""

from __future__ import annotations

import pytest

from spec_tests.programs import draw
from spec_tests.programs.scene import TRAINERS
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRAINERS, level="correct", worlds=(3,))


@clause(
    "trainer.programs.any-situation",
    source="contract: Trainer.step/one-process; Cohen et al. 1997, The AETG system",
)
@pytest.mark.parametrize("part", range(draw.PARTS))
def test_any_situation_does_what_one_process_does(world, subject, part):
    """In any scene any legal program of a trainer's calls MUST do what it does in one process.

    Scenes in which every two words meet, in each steps, evaluations, rates, checkpoints and what
    other models do, in any order; and the situations of `spec_tests/programs/seeds.toml`.
    """
    draw.judge_part(world, subject, "correct", part)
