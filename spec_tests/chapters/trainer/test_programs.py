"""Programs: any situation of a trainer, in any order of its calls."""

from __future__ import annotations

from functools import partial

from spec_tests.programs import draw
from spec_tests.programs.scene import TRAINERS
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=TRAINERS, level="correct", worlds=(3,))
drawn = rows(clause, partial(draw.judge_part, level="correct"))

test_any_situation = drawn(
    "trainer.programs.any-situation",
    "In any scene any legal program of a trainer's calls MUST do what it does in one process.",
    # Scenes in which every two words meet, in each steps, evaluations, rates, checkpoints and what
    # other models do, in any order; and the situations of `spec_tests/programs/seeds.toml`.
    range(draw.PARTS),
    source="contract: Trainer.step/one-process; Cohen et al. 1997, The AETG system",
)
