"""Training: several steps, with state that an optimizer keeps over shards.

What begins with the second step is invisible in the first: moments of the wrong rows, weights that
were gathered before the update, parameters that the optimizer does not have.

State dict: what a sharded model gives and takes, whatever it has just done.

A checkpoint may be written after an evaluation, in the middle of a window, before the first step.
Full weights that happen to be alive must not get into it, and a load has to reach the shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.laws import equivalence, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=sharded.BOTH, level="correct")

STEPS = 4
RATE = 2.0**-16
"""Weights move by ten times what rounding may move them, or more."""
DECAY = 2.0**8
"""Times the rate: a 256th of a weight in each step."""


def trained(ctx, subject, toy, seed, steps, decay=0.0):
    """Full weights after training with momentum on this rank's share of every batch."""
    model = sharded.sharded_toy(ctx, subject, toy, seed)
    settings = {"lr": RATE, "momentum": 0.9, "weight_decay": decay, "foreach": False}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        batch = TOYS[toy].batch(seed, rank=ctx.rank, micro=step).to(ctx.device)
        (ctx.world_size * sum_of_squares(model(batch))).backward()
        sharded.finish(ctx, subject, model)
        optimizer.step()
    return sharded.full_parameters(ctx, model, [*oracle.parameters(toy, seed)])


def _judge_training(ranks, size, toy, seed, decay=0.0):
    __tracebackhide__ = True
    within = rounding(torch.float32, terms=12 * 4 * size, depth=4 * STEPS)
    equivalence.trained_weights(
        ranks, toy, seed, steps=STEPS, within=within, lr=RATE, weight_decay=decay
    )


@clause(
    "fsdp.training.equals-full-batch",
    level="course",
    source="contract: mean-gradient; CS336 assignment 2, test_fsdp; Efficient DL week 5",
    worlds=(2, 3, 4),
)
def test_training_in_shards_equals_training_on_the_whole(world, subject):
    """Training in W shards MUST give the full weights of one process on the whole batches."""
    _judge_training(world.run(trained, subject, "even", 7, STEPS), world.size, "even", 7)


@clause(
    "fsdp.training.equals-full-batch-of-any-model",
    source="contract: mean-gradient, any-rows, tied, frozen; Zhao et al. 2023, section 3.2",
    worlds=(3,),
)
@pytest.mark.parametrize("toy", ["mlp", "frozen", "tied", "reordered", "unused"])
def test_training_any_model_in_shards_equals_training_on_the_whole(world, subject, toy):
    """Training with odd sizes, ties or any order MUST give one process's weights, or be refused.

    Weights decay: what has become two parameters of one decays twice, and what is used on no rank
    not at all, since its gradient is None.
    """
    ranks = refusal.answer_or_refusal(world, trained, subject, toy, 8, STEPS, DECAY)

    if ranks is not None:
        _judge_training(ranks, world.size, toy, 8, DECAY)


def identities(ctx, subject):
    """Which Parameter objects there are at the start, and whether they are so after each phase."""
    rank = sharded.on_rank(ctx, subject, "even")
    start, (optimizer,) = dict(rank.module.named_parameters()), rank.optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {"in the optimizer": sorted(n for n, p in start.items() if id(p) not in held)}

    def others():
        return [n for n, p in rank.module.named_parameters() if p is not start[n]]

    for step in range(2):
        rank.backward(str(step))
        found[f"after backward {step}"] = others()
        found[f"with a gradient {step}"] = [n for n, p in start.items() if p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
        found[f"after step {step}"] = others()
    return found


@clause(
    "fsdp.training.same-parameter-objects",
    judges=sharded.FULLY_SHARD,
    source="contract: as-pytorch; test_fully_shard_state; pytorch issue 149205",
)
def test_the_optimizer_keeps_the_objects_that_it_was_given(world, subject):
    """Gradients MUST arrive at the Parameter objects that an optimizer took after sharding.

    Objects made anew in each pass leave the optimizer with ones that nothing reaches any more.
    """
    ranks = world.run(identities, subject)

    what = "parameters that are others than at the start, or have no gradient, by phase:"
    judge.equal(ranks, {phase: [] for phase in ranks[0]}, quantity=what)


@clause(
    "fsdp.training.repeatable",
    source="contract: equal-runs; the same inputs in the same order give the same bits",
    worlds=(2, 3),
)
def test_the_same_run_twice_gives_the_same_bits(world, subject):
    """Two equal runs MUST end with equal bits, on all ranks: no race decides a result."""
    first, second = (world.run(sharded.trajectory, subject, "even") for _ in range(2))

    weights = [{n: rank[n] for n in oracle.parameters("even", sharded.SEED)} for rank in first]
    judge.same_on_all_ranks(weights, quantity="full weight", given="float32, AdamW")
    judge.tensors(second, first, quantity="value of the first run", given="float32, AdamW")


PAGE = "test_fully_shard_state_dict; pytorch issues 131965 and 154655"


def at_a_moment(ctx, subject, calls):
    """Keys of the state dict, entries that are not sharded, and its values put together."""
    from torch.distributed.tensor import DTensor

    rank = sharded.on_rank(ctx, subject, "stack")
    rank.follow(calls)
    state: dict[str, Any] = rank.wrapped.state_dict()
    names = dict(rank.module.named_buffers())
    whole = sorted(n for n, v in state.items() if n not in names and type(v) is not DTensor)
    values = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
    return list(state), whole, {name: value.clone() for name, value in values.items()}


MOMENTS = {
    "at-once": "",
    "after-evaluation": "evaluate 0",
    "unsharded-by-hand": "unshard now",
}


@clause(
    "fsdp.state-dict.sharded-at-any-moment",
    source="contract: state-dict, dtensors; " + PAGE,
    worlds=(2, 3),
    judges=sharded.FULLY_SHARD,
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_state_dict_is_sharded_whatever_came_before(world, subject, moment):
    """A state dict MUST hold shards under the plain model's keys, whatever is unsharded."""
    ranks = world.run(at_a_moment, subject, MOMENTS[moment])
    keys, whole, values = zip(*ranks, strict=True)

    judge.equal(keys, list(TOYS["stack"].build(sharded.SEED).state_dict()), quantity="keys")
    judge.equal(whole, [], quantity="entries that are not sharded")
    built = oracle.parameters("stack", sharded.SEED)
    judge.tensors(values, built, quantity="value in the state dict", given=moment)
