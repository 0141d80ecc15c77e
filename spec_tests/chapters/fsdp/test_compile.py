"""Compilation: units compiled before or after they are sharded, and sharded models compiled whole.

What `torch.compile` promises of `fully_shard` is that nothing changes but speed. The head of
`programs/laws/compiled.py` says how that fails; backends without a code generator show it as well,
in a second.
"""

from __future__ import annotations

from functools import partial

import pytest

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD
from spec_tests.programs.laws import compiled
from spec_tests.programs.ways import Shards
from spec_tests.rig.clause import clauses

clause = clauses(
    judges=FULLY_SHARD,
    level="production",
    worlds=(2,),
    transports=("gloo", "cuda"),  # a compiler does not trace what simulates ranks
    source="torch.distributed.fsdp with torch.compile; torchtitan compiles each block, then shards",
)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
OPTIONS = {
    "reshard": "stack freed",
    "keep": "stack held",
    "precision": "stack freed brain",
    "checkpoint": "stack freed recomputed",
}
CASES = [
    *[f"{how}, reshard" for how in compiled.HOW],
    "before aot_eager, keep",
    "whole aot_eager, keep",
    "after eager, precision",
    "before aot_eager, checkpoint",
    "whole aot_eager, checkpoint",
]
"""Each takes a second: every way to compile, and every option with one or two of them."""


def gradients(ctx, subject, how, option, **options):
    """Gradients after the calls, eager and compiled, and how many graphs there were."""
    make = partial(Shards, ctx, subject, OPTIONS[option], parts=BLOCKS, **options)
    return compiled.gradients(make, how)


@clause(
    "fsdp.compile.like-eager",
    source="contract: compile, compile-model; "
    "torch.distributed.fsdp with torch.compile; torchtitan compiles each block, then shards",
)
@pytest.mark.parametrize("case", CASES)
def test_compiled_units_compute_what_they_do_without(world, subject, case):
    """Compiled units MUST have the gradients of the same run without a compiler.

    Also after an update and after accumulation, with full weights freed or kept after forward, in
    bfloat16, and with activation checkpointing inside the units.
    """
    ranks = world.run(gradients, subject, *case.split(", "))

    compiled.like_eager(ranks, case)


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
