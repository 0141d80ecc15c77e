"""Compilation: a model compiled before it is wrapped or after, and a wrapped model compiled whole.

What goes wrong is in the head of `programs/laws/compiled.py`.
"""

from __future__ import annotations

from functools import partial

import pytest

from spec_tests.programs.laws import compiled
from spec_tests.programs.ways import Replicas
from spec_tests.rig.clause import clauses

clause = clauses(
    judges=("ddp", "ddp_bucketed"),
    needs=("no_sync",),
    level="production",
    transports=("gloo", "cuda"),  # a compiler does not trace what simulates ranks
    source="DistributedDataParallel with torch.compile",
)


def gradients(ctx, subject, scene, how):
    """Gradients after the calls, eager and compiled, and how many graphs there were."""
    # PyTorch cuts graphs at buckets, and asserts that these are no less than 1 MiB.
    make = partial(Replicas, ctx, subject, scene, bucket_size_mb=2.0, parts=[""])
    return compiled.gradients(make, how)


SCENES = {"mlp": "mlp", "frozen": "mlp not-the-ends"}


@clause(
    "ddp.compile.like-eager",
    source="contract: compile, compile-wrapper; DistributedDataParallel with torch.compile",
)
@pytest.mark.parametrize("toy", SCENES)
@pytest.mark.parametrize("how", compiled.HOW)
def test_a_compiled_model_has_the_same_mean_gradients(world, subject, toy, how):
    """Compiled by torch.compile, gradients MUST be those of the same run without it."""
    ranks = world.run(gradients, subject, SCENES[toy], how)

    compiled.like_eager(ranks, f"{SCENES[toy]}, {how}")
