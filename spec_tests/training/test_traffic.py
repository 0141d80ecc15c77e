"""Traffic: one copy of the gradients per optimizer step, however many micro-batches there are.

The famous defect of training loops: `no_sync` around the backward alone. DistributedDataParallel
decides in the *forward* whether to reduce, so every micro-batch is reduced; the numbers are right,
the traffic is N times what it should be. The reverse, the forward alone, sends nothing at all.
"""

from __future__ import annotations

import pytest

from spec_tests.clause import clause
from spec_tests.laws import traffic
from spec_tests.training.loop import TRAIN, WRAPPERS, Counted, Job, ToyLanguageModel, Trainee


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
