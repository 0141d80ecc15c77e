"""Unusual optimizers: what looks at whole tensors, counts in its groups, takes further keywords.

SGD and Adam update each element by itself and keep nothing in their groups, and so hide what a
sharded optimizer hands on and what it drops. Others are updated rightly, or refused.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.zero1.runs import Run, as_unsharded_or_refused, same_as_unsharded
from spec_tests.rig.clause import clauses

clause = clauses(needs=("sharded_optimizer",), level="correct", worlds=(2, 3))
FOUR = (1, 2, 3, 4)
SQUARES = "reordered"
"""Matrices of equal sides: for clauses on unusual optimizers, which say nothing on sizes."""


@clause(
    "zero1.step.whole-tensors",
    source="contract: whole-tensors; DeepSpeed, zero_allow_untested_optimizer",
)
def test_what_looks_at_whole_tensors_gets_them(world):
    """Optimizers that look at whole tensors MUST see them, or be refused with an error.

    Adafactor divides by means of rows and columns. Of flat stretches it makes something else.
    """
    as_unsharded_or_refused(world, Run.steps, *FOUR, optimizer="adafactor", toy=SQUARES)


@clause(
    "zero1.step.counts-in-groups",
    source="contract: counts-in-groups; Prodigy and schedule-free keep such",
)
@pytest.mark.parametrize("optimizer", ["counting", "declared"])
def test_what_an_optimizer_keeps_in_its_groups_stays(world, optimizer):
    """What an optimizer writes into its own groups MUST be there at its next step, or be refused.

    Options that are copied from outside in every step may overwrite it.
    """
    as_unsharded_or_refused(world, Run.steps, *FOUR, optimizer=optimizer, toy=SQUARES)


def with_factors(run):
    """Weights after steps with a keyword of the optimizer's own."""
    for number in range(1, 4):
        run.deal(number)
        run.optimizer.step(factor=2.0**-number)
        run.note(f"after step {number}")
    return run.seen


@clause(
    "zero1.step.keywords",
    source="contract: step-keywords; "
    "ZeroRedundancyOptimizer.step(closure, **kwargs); CS336 assignment 2, likewise",
)
def test_keywords_of_a_step_reach_the_optimizer(world):
    """Keyword arguments of `step` MUST reach the optimizer's own, or be refused with an error."""
    as_unsharded_or_refused(world, with_factors, optimizer="counting", toy=SQUARES)


@clause(
    "zero1.step.half-precision",
    source="contract: any-parameters; "
    "padding in float32 beside parameters in bfloat16, in a solution of CS336",
)
def test_parameters_in_bfloat16_are_updated(world):
    """Parameters that are all bfloat16 MUST get the weights that the unsharded optimizer gives."""
    same_as_unsharded(world, Run.steps, *FOUR, optimizer="sgd", dtype=torch.bfloat16)
