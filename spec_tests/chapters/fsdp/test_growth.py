"""Growth: what stays from one step, one exception, one model to the next."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.chapters.fsdp.sharded import BOTH, FULLY_SHARD, shard
from spec_tests.chapters.fsdp.test_footprint import UNIT, WIDTH, Tower, backward, footprints
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import footprint
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=BOTH, level="correct")


@clause(
    "fsdp.footprint.no-growth",
    source="contract: no-growth; buffers, hooks and handles that gather over thousands of steps",
)
def test_memory_does_not_grow_from_step_to_step(world, subject):
    """Live bytes MUST be the same after every step but the first."""
    for rank, seen in enumerate(world.run(footprints, subject, 2, steps=5)):
        before, after = seen["after step 1"], seen["after step 4"]
        if after > before:
            raise judge.violated(
                f"rank {rank}: expected {before} live bytes as after step 1, got {after} after "
                "step 4",
                likely="something is appended in every step and never taken away",
                evidence=footprint.shown(rank, seen["history"], "after step 4", after, before),
            )


class Shortcut(Tower):
    """A tower of which a forward may leave the last layer out."""

    def forward(self, x: torch.Tensor, number: int = 3) -> torch.Tensor:
        for layer in self.layers[:number]:
            x = layer(x).abs()
        return x


def shorter_evaluation(ctx, subject):
    """Live bytes after a step, and after an evaluation that leaves out the last layer."""
    x = torch.ones(2, WIDTH, device=ctx.device)
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Shortcut(3))
        backward(ctx, subject, model)
        model.zero_grad()
        before = footprint.settled(recorder)
        with torch.no_grad():
            model(x, 2)
        return before, footprint.settled(recorder)


@clause(
    "fsdp.footprint.shorter-evaluation",
    level="production",
    source="contract: waits; early exits, layer drop",
)
def test_an_evaluation_that_ends_early_leaves_no_layer_behind(world, subject):
    """An evaluation that leaves out the last layer MUST NOT leave it gathered, or on its way."""
    for rank, (before, after) in enumerate(world.run(shorter_evaluation, subject)):
        judge.holds(
            after <= before,
            f"rank {rank}: expected at most {before} live bytes, as before it, got {after}",
            likely="the next layer was gathered ahead, and nobody took it",
        )


class Aside(Tower):
    """A tower whose last layer computes something that no loss uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            found, x = x, layer(x).abs()
        return found


def kept_for_nothing(ctx, subject):
    """Live bytes of shards, and after a backward that does not reach a unit that was kept."""
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Aside(3), reshard_after_forward=False)
        built = footprint.settled(recorder)
        backward(ctx, subject, model)
        model.zero_grad()
        return built, footprint.settled(recorder)


@clause(
    "fsdp.footprint.kept-for-nothing",
    level="production",
    judges=FULLY_SHARD,
    source="contract: as-pytorch; "
    "FSDP2 reshards all units at the end of a backward; auxiliary heads",
)
def test_what_was_kept_for_a_backward_is_freed_if_it_does_not_come(world, subject):
    """With reshard_after_forward=False, a backward MUST also free the units it does not reach."""
    for rank, (built, after) in enumerate(world.run(kept_for_nothing, subject)):
        judge.holds(
            after < built + UNIT // 2,
            f"rank {rank}: expected {built} live bytes as before the step, got {after}; a layer "
            f"has {UNIT}",
            likely="what was kept waits for a backward of its own",
        )


@clause(
    "fsdp.footprint.models-made-and-dropped",
    source="contract: dropped-models; "
    "searches of hyperparameters and notebooks: one process makes many models",
    transports=("gloo", "cuda"),  # simulated ranks share the memory of one process
)
def test_a_model_that_is_dropped_leaves_nothing_behind(world, subject):
    """Live bytes MUST NOT grow where models are made, trained and dropped in turn."""
    three = "another_lives, another_lives, another_lives"
    same_as_alone(world, subject, three, looks=("sent",), values=False)
