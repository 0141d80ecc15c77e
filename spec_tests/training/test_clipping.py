"""Clipping: once per step, by the norm of the gradient that the optimizer sees.

Clipping each micro-batch, or each rank's part, changes the direction of the step and not only its
length: by 0.8 of it in an experiment. See Pascanu et al. 2013 and torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import pytest

from spec_tests.clause import clauses
from spec_tests.rig import judge
from spec_tests.training.loop import CONTRACT, TRAIN, WRAPPERS, Job, alone, at, trained

clause = clauses(judges=TRAIN, level="correct")

TORCH = "torch.nn.utils.clip_grad_norm_"
# torch adds 1e-6 to the norm before it divides; other right code does not.
EPSILON = 1e-6


def judged(ranks, job):
    """Every rank's weights are those of one process that clips once."""
    __tracebackhide__ = True
    right = alone(job)
    slack = EPSILON / min(right.norms) * job.steps
    judge.tensors(
        [rank["weights"] for rank in ranks],
        right.last,
        quantity="weight after clipped steps",
        within=job.tolerance().plus(slack, "1e-6 beside the norm"),
        given=f"{job}, norms {[round(norm, 3) for norm in right.norms]}",
    )


@clause("training.clip.once-per-step", source=CONTRACT + "; " + TORCH, worlds=(1, 2, 3))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_whole_mean_gradient_is_clipped_once(world, subject, wrapper):
    """With max_norm the whole, reduced gradient MUST be clipped once, after all micro-batches."""
    job = Job(2, 2, world.size, steps=2, targets="ragged", max_norm=0.1)
    ranks = world.run(trained, wrapper, job)

    judged(ranks, job)


@clause("training.clip.leaves-small-gradients", source=TORCH)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_gradient_below_the_bound_is_left_alone(world, subject, wrapper):
    """A gradient whose norm is below max_norm MUST be left as it is, neither cut nor stretched."""
    job = Job(2, 2, world.size, steps=2)
    bound = 1.05 * max(alone(job).norms)
    ranks = world.run(trained, wrapper, at(job, max_norm=bound))

    judged(ranks, at(job, max_norm=bound))
