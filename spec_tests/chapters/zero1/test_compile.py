"""Compilation: `torch.compile(optimizer.step)` updates and sends like the step itself.

The first step makes the state and the next ones find it, so several are made; a rate that changes
must not be a constant of the first graph. SGD on integers: a compiler may not round differently.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spec_tests.chapters.zero1.runs import in_ranks, like_unsharded
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle

clause = clauses(needs=("sharded_optimizer",), level="production", worlds=(2,))
SCENE = "ragged momentum"


def compiled(stepped, backend=""):
    """Four steps, the last two at half the rate."""
    step = stepped.optimizer.step
    seen: oracle.Named = {}
    if backend:
        torch.compile(compiled, backend=backend)  # "not here" where compilers are stood in for
        torch._dynamo.reset()
        step = torch.compile(step, backend=backend)
    for number in range(4):
        if number == 2:
            stepped.rate("0.5")
        stepped.deal(str(number), "all")
        step()
        seen |= {f"{name} after step {number}": w for name, w in stepped.weights().items()}
    return seen


@clause(
    "zero1.compile.step",
    source="contract: compile; torch.compile(optimizer.step), also of ZeroRedundancyOptimizer",
    transports=("gloo", "cuda"),  # a compiler does not trace what simulates ranks
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_gives_the_unsharded_optimizers_weights(world, backend):
    """After a compiled step all ranks MUST hold the weights that the unsharded optimizer gives."""
    ranks = world.run(in_ranks, partial(compiled, backend=backend), SCENE)

    like_unsharded(ranks, compiled, SCENE)
