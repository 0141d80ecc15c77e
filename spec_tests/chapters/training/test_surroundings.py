"""Surroundings: what a loop is given, and what it may not look at.

Batches come as slices of longer rows, and a process group need not be the world that a launcher
wrote into the environment.

Traffic: one copy of the gradients per optimizer step, however many micro-batches there are.

The famous defect of training loops: `no_sync` around the backward alone. DistributedDataParallel
decides in the *forward* whether to reduce, so every micro-batch is reduced; the numbers are right,
the traffic is N times what it should be. The reverse, the forward alone, sends nothing at all.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest

from spec_tests.chapters.training.loop import (
    TRAIN,
    WRAPPERS,
    Counted,
    Job,
    ToyLanguageModel,
    Trainee,
    trained,
)
from spec_tests.chapters.training.test_gradient import judged
from spec_tests.programs.laws import traffic
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRAIN, level="correct")

LIE = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"}


def in_a_lying_environment(ctx, wrapper, job):
    """Weights of a job whose environment tells of another rank in another world."""
    trainee = Trainee.of(ctx, wrapper, job.seed)
    with mock.patch.dict(os.environ, LIE):
        trainee.train(ctx, job, Counted(job.micro_batches(ctx.rank)))
    return {"weights": trainee.weights()}


@clause(
    "training.gradient.world-of-the-group",
    source="contract: world; a course's trainer divides by WORLD_SIZE",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_process_group_says_how_many_ranks_there_are(world, subject, wrapper):
    """The number of ranks MUST be read from the process group, not from the environment.

    The two differ in a notebook, under a custom launcher, and on a sub-group.
    """
    job = Job(2, 2, world.size, steps=2)
    ranks = world.run(in_a_lying_environment, wrapper, job)

    judged(ranks, job, given="WORLD_SIZE=5 in the environment")


@clause(
    "training.gradient.in-pytorchs-wrapper",
    level="production",
    source="contract: ddp-model; "
    "torch.nn.parallel.DistributedDataParallel: no finish, no_sync in a window",
    worlds=(2, 3),
)
def test_pytorchs_wrapper_is_one_as_well(world, subject):
    """A model in DistributedDataParallel MUST be trained like one in the loop's own wrapper."""
    job = Job(2, 2, world.size, steps=2, targets="ragged")
    ranks = world.run(trained, "torch", job)

    judged(ranks, job, given="torch.nn.parallel.DistributedDataParallel")


def on_slices(ctx, wrapper, job):
    """Weights of a job whose ids and targets are slices of longer rows."""
    trainee = Trainee.of(ctx, wrapper, job.seed)
    batches = ((_sliced(ids), _sliced(targets)) for ids, targets in job.micro_batches(ctx.rank))
    trainee.train(ctx, job, Counted(batches))
    return {"weights": trainee.weights()}


def _sliced(rows):
    longer = rows.new_zeros(len(rows), rows.shape[1] + 2)
    longer[:, 1:-1] = rows
    return longer[:, 1:-1]


@clause(
    "training.gradient.slices",
    source="contract: slices; a course's trainer calls .view(-1) on tokens[:, 1:]",
    worlds=(1, 2),
)
def test_batches_may_be_slices(world, subject):
    """Ids and targets that are not contiguous in memory MUST be trained on alike.

    Inputs and targets of a window are `tokens[:, :-1]` and `tokens[:, 1:]`: neither is contiguous.
    """
    job = Job(2, 2, world.size, targets="ragged")
    ranks = world.run(on_slices, "ddp" if world.size > 1 else "plain", job)

    judged(ranks, job, given="slices of longer rows")


def sent(ctx, wrapper, job):
    """What a call of `train` sends, after a first one in which a wrapper may settle."""
    trainee = Trainee.of(ctx, wrapper, job.seed)
    batches = Counted(job.micro_batches(ctx.rank))
    trainee.train(ctx, job, batches)
    with ctx.recording() as recorder:
        trainee.train(ctx, job, batches)
    return recorder.log()


@clause(
    "training.traffic.one-reduction-per-step",
    level="production",
    judges=TRAIN,
    source="accelerate issue 1726, sentence-transformers issue 4027, speechbrain issue 1802",
    worlds=(2, 3),
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_reduced_once_per_optimizer_step(world, subject, wrapper, accumulate):
    """Each optimizer step MUST reduce every trainable element once, not once per micro-batch.

    On the implementation's own wrapper. Token counts, losses and flags may be sent in addition.
    """
    job = Job(1, accumulate, world.size, steps=2)
    logs = world.run(sent, wrapper, job)

    sizes = [parameter.numel() for parameter in ToyLanguageModel(0).parameters()]
    traffic.reduced_once(
        logs,
        numel=sum(sizes),
        times=job.steps,
        bookkeeping=job.steps * (8 * accumulate + 8 + 2 * len(sizes)),
        likely="forward outside of no_sync, or no_sync not used: every micro-batch is reduced",
        given=str(job),
    )
