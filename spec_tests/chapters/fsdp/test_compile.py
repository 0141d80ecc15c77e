"""Compilation: units compiled before or after they are sharded, and sharded models compiled whole.

What `torch.compile` promises of `fully_shard` is that nothing changes but speed. The head of
`programs/laws/compiled.py` says how that fails; backends without a code generator show it as well,
in a second.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD, shard
from spec_tests.programs.calls import parsed
from spec_tests.programs.laws import compiled
from spec_tests.programs.scene import Scene
from spec_tests.programs.ways import Shards
from spec_tests.rig.clause import clauses

clause = clauses(
    judges=FULLY_SHARD,
    level="production",
    transports=("gloo", "cuda"),  # a compiler does not trace what simulates ranks
    source="torch.distributed.fsdp with torch.compile; torchtitan compiles each block, then shards",
)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


PROGRAM = parsed("backward 0, zero_grad none, write parameters, accumulate 1, backward 2")


class Compiled(Shards):
    """A sharded stack of which blocks, or which itself, is compiled."""

    def __init__(self, ctx, subject, how="", option="", fullgraph=False):  # type: ignore[no-untyped-def]  # a body
        self.how, self.option, self.fullgraph = how, option, fullgraph
        super().__init__(ctx, subject, Scene.of("stack"))
        self.called = self.wrapped if self.whole is None else self.whole

    def wrap(self):
        """Compile, and shard blocks and the whole."""
        options = {"reshard_after_forward": self.option != "keep"}
        if self.option == "precision":
            policy = self.ctx.impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            options["mp_policy"] = policy
        if self.option == "checkpoint":
            for name in BLOCKS:
                compute_twice(self.module.get_submodule(name))
        made = partial(shard, self.ctx, self.subject, self.module, [*BLOCKS, "head"], **options)
        wrapped, self.whole = compiled.wrapped(
            self.module, made, BLOCKS, self.how, fullgraph=self.fullgraph
        )
        return wrapped

    def gradients_after(self):
        """Whole gradients after the program."""
        self.follow(PROGRAM)
        return {n: None if p.grad is None else p.grad.full_tensor() for n, p in self.named()}


def compute_twice(module):
    """Let `module` repeat its forward in backward."""
    kind = type(module)

    def forward(self, x):
        return checkpoint(lambda y: kind.forward(self, y), x, use_reentrant=False)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def gradients(ctx, subject, how, option, fullgraph=False):
    """Gradients after the calls, eager and compiled, and how many graphs there were."""
    eager = Compiled(ctx, subject, option=option).gradients_after()
    seen = Compiled(ctx, subject, how, option, fullgraph).gradients_after()
    return eager, seen, compiled.num_graphs()


@clause(
    "fsdp.compile.like-eager",
    source="contract: compile, compile-model; "
    "torch.distributed.fsdp with torch.compile; torchtitan compiles each block, then shards",
)
@pytest.mark.parametrize("option", ["reshard", "keep", "precision", "checkpoint"])
@pytest.mark.parametrize("how", compiled.HOW)
def test_compiled_units_compute_what_they_do_without(world, subject, option, how):
    """Compiled units MUST have the gradients of the same run without a compiler.

    Also after an update and after accumulation, with full weights freed or kept after forward, in
    bfloat16, and with activation checkpointing inside the units.
    """
    ranks = world.run(gradients, subject, how, option)

    compiled.like_eager(ranks, f"{how}, {option}")


@clause(
    "fsdp.compile.one-graph",
    source="contract: compile; "
    "torch.distributed.fsdp with torch.compile; torchtitan compiles each block, then shards",
)
@pytest.mark.parametrize("how", compiled.HOW[:2])
def test_hooks_stay_out_of_the_graphs_of_units(world, subject, how):
    """A block that compiles with fullgraph=True MUST do so as a unit as well."""
    ranks = world.run(gradients, subject, how, "reshard", fullgraph=True)

    compiled.like_eager(ranks, f"{how}, fullgraph=True")
