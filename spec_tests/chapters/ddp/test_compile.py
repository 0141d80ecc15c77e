"""Compilation: a model compiled before it is wrapped or after, and a wrapped model compiled whole.

What goes wrong is in the head of `programs/laws/compiled.py`.
"""

from __future__ import annotations

from functools import partial

import pytest

from spec_tests.chapters.ddp.replica import Replica
from spec_tests.programs.laws import compiled
from spec_tests.rig.clause import clauses

clause = clauses(
    judges=("ddp", "ddp_bucketed"),
    needs=("no_sync",),
    level="production",
    transports=("gloo", "cuda"),  # a compiler does not trace what simulates ranks
    source="DistributedDataParallel with torch.compile",
)


class Compiled(Replica):
    """A replicated toy that is compiled."""

    def wrap(self, subject, how=""):  # type: ignore[override]  # options of its own
        # PyTorch cuts graphs at buckets, and asserts that these are no less than 1 MiB.
        made = partial(super().wrap, subject, bucket_size_mb=2.0)
        wrapped, self.called = compiled.wrapped(self.module, made, [""], how)
        return wrapped


def gradients(ctx, subject, toy, how):
    """Gradients after the calls, eager and compiled, and how many graphs there were."""
    eager = Compiled(ctx, subject, toy).gradients_after(compiled.CALLS)
    seen = Compiled(ctx, subject, toy, how=how).gradients_after(compiled.CALLS)
    return eager, seen, compiled.num_graphs()


@clause(
    "ddp.compile.like-eager",
    source="contract: compile, compile-wrapper; DistributedDataParallel with torch.compile",
)
@pytest.mark.parametrize("toy", ["mlp", "frozen"])
@pytest.mark.parametrize("how", compiled.HOW)
def test_a_compiled_model_has_the_same_mean_gradients(world, subject, toy, how):
    """Compiled by torch.compile, gradients MUST be those of the same run without it."""
    ranks = world.run(gradients, subject, toy, how)

    compiled.like_eager(ranks, f"toy {toy!r}, {how}")
