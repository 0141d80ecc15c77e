"""A sharded optimizer's state is on many ranks, and in a checkpoint it is one state again.

Every rank has the moments of other parameters, so whoever saves what the first rank has loses most
of them. The save must be the plain optimizer's: for any number of ranks, and for none. A save that
refuses a sharded optimizer, with an error on all ranks, is right as well.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.checkpoint.disk import folder
from spec_tests.clause import clause
from spec_tests.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.symptoms import Hint
from spec_tests.rig.tolerance import rounding
from spec_tests.rig.toys import TOYS, sum_of_squares

NEEDS = ("save_checkpoint", "load_checkpoint", "sharded_optimizer")
TOY, STEPS = "ragged", 2


class Trained:
    """A toy that all ranks train on the same batches, with a sharded or a plain AdamW."""

    def __init__(self, ctx, *, seed, is_sharded):
        self.ctx = ctx
        self.module = TOYS[TOY].build(seed)
        parameters = self.module.parameters()
        if is_sharded:
            self.optimizer = ctx.impl.sharded_optimizer(parameters, torch.optim.AdamW, lr=0.01)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def train(self, *numbers):
        """Steps on the batches of these numbers; the weights afterwards."""
        for number in numbers:
            self.optimizer.zero_grad()
            sum_of_squares(self.module(TOYS[TOY].batch(7, rank=0, micro=number))).backward()
            self.optimizer.step()
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def saved(ctx, directory):
    """Weights at the save, and of the run that goes on without stopping."""
    run = Trained(ctx, seed=7, is_sharded=True)
    run.train(1, 2)
    ctx.impl.save_checkpoint(directory, step=STEPS, model=run.module, optimizer=run.optimizer)
    return run.train(3, 4)


def went_on(ctx, directory, is_sharded):
    """Weights of a fresh run that loads and goes on."""
    run = Trained(ctx, seed=8, is_sharded=is_sharded)
    run.train(9)  # whatever was there before must not matter
    ctx.impl.load_checkpoint(directory, model=run.module, optimizer=run.optimizer)
    return run.train(3, 4)


def cold(ctx, directory):
    """Weights where the moments are lost."""
    run = Trained(ctx, seed=7, is_sharded=False)
    run.train(1, 2)
    run.optimizer.state.clear()
    return run.train(3, 4)


@clause(
    "checkpoint.sharded-optimizer.any-world-size",
    level="correct",
    needs=NEEDS,
    source="ZeroRedundancyOptimizer.consolidate_state_dict; KempnerForge pull request 115",
)
@pytest.mark.parametrize("then", ["on-2-ranks", "on-3-ranks", "unsharded"])
def test_it_goes_on_with_any_number_of_ranks_or_unsharded(world, then):
    """A save of a sharded optimizer MUST go on at any world size, and unsharded, or be refused."""
    size = {"on-2-ranks": 2, "on-3-ranks": 3, "unsharded": 1}[then]
    with folder() as directory:
        first = refusal.answer_or_refusal(world, saved, directory)
        if first is None:
            return
        other = world.worlds.world(size, world.target)
        ranks = refusal.answer_or_refusal(other, went_on, directory, then != "unsharded")
        lost = world.run(cold, directory)[0]

    if ranks is not None:
        judge.tensors(
            ranks,
            first[0],
            quantity="weight of the uninterrupted run",
            within=rounding(torch.float32, terms=64, depth=2 * STEPS),
            hints=[
                Hint("the weight without the moments: they were not saved, or not loaded", lost)
            ],
            given=f"saved on {world.size} ranks, went on {then}",
        )
