"""Unusual optimizers: what looks at whole tensors, counts in its groups, takes further keywords.

SGD and Adam update each element by itself and keep nothing in their groups, and so hide what a
sharded optimizer hands on and what it drops. Others are updated rightly, or refused.
"""

from __future__ import annotations

from spec_tests.chapters.zero1.runs import TOY, in_ranks, like_unsharded, steps
from spec_tests.programs.law import follow, judge_updates, same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle

clause = clauses(judges=("sharded_optimizer",), level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)
FOUR = steps(1, 2, 3, 4)

test_whole_tensors = holds(
    "zero1.step.whole-tensors",
    "Optimizers that look at whole tensors MUST see them, or be refused with an error.",
    # Adafactor divides by means of rows and columns. Of flat stretches it makes something else.
    f"{TOY} adafactor: {FOUR}",
    source="contract: whole-tensors; DeepSpeed, zero_allow_untested_optimizer",
)

test_counts_in_groups = holds(
    "zero1.step.counts-in-groups",
    "Values that an optimizer writes into its groups MUST stay to its next step, or be refused.",
    # Options that are copied from outside in every step may overwrite it.
    {
        case: f"{TOY} {kind}: {FOUR}"
        for case, kind in {"counting": "counts-later", "declared": "counts-steps"}.items()
    },
    source="contract: counts-in-groups; Prodigy and schedule-free keep such",
)


def with_factors(stepped):
    """Weights after steps with a keyword of the optimizer's own."""
    seen: oracle.Named = {}
    for number in range(1, 4):
        stepped.deal(str(number), "all")
        stepped.optimizer.step(factor=2.0**-number)
        seen |= {f"{name} after step {number}": w for name, w in stepped.weights().items()}
    return seen


@clause(
    "zero1.step.keywords",
    source="contract: step-keywords; "
    "ZeroRedundancyOptimizer.step(closure, **kwargs); CS336 assignment 2, likewise",
)
def test_keywords_of_a_step_reach_the_optimizer(world, subject):
    """Keyword arguments of `step` MUST reach the optimizer's own, or be refused with an error."""
    script, ordinary = (with_factors, f"{TOY} counts-later"), f"{TOY} adamw: {FOUR}"
    ranks = refusal.answer_or_refusal(
        world, in_ranks, *script, ordinary=(follow, subject, ordinary)
    )
    if ranks is not None:
        like_unsharded(ranks, *script)


@clause(
    "zero1.step.half-precision",
    source="contract: any-parameters; "
    "padding in float32 beside parameters in bfloat16, in a solution of CS336",
)
def test_parameters_in_bfloat16_are_updated(world, subject):
    """Parameters that are all bfloat16 MUST get the weights that the unsharded optimizer gives."""
    line = f"narrow bfloat16 sgd: {FOUR}"
    ranks = world.run(follow, subject, line)

    judge_updates([rank["seen"] for rank in ranks], line)
