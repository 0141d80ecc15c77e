"""Records: what is reported of a step is what happened in it, on all ranks together.

A loss curve is what people look at. Of the last micro-batch alone it is noisy, of rank 0 alone it
hides a rank that learns nothing, divided once more it is too good; a learning rate that is read
after the scheduler has moved on belongs to another step.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.training.loop import (
    TRAIN,
    WRAPPERS,
    Counted,
    Job,
    Trainee,
    alone,
    as_series,
    at,
    field_of,
    series,
    trained,
)
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=TRAIN, level="correct", worlds=(1, 2))


@clause(
    "training.records.one-per-step",
    source="contract: records; a course's loop returned the last step only, and a test compared it",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_there_is_one_record_and_one_update_per_step(world, subject, wrapper):
    """`train` MUST do as many updates as it is asked for, and return one record of each."""
    job = Job(1, 3, world.size, steps=4)
    ranks = world.run(trained, wrapper, job)

    judge.equal(
        [(len(rank["records"]), len(rank["rates"])) for rank in ranks],
        (job.steps, job.steps),
        quantity="number of records and of updates",
        given=str(job),
    )


@clause("training.records.loss", source="contract: loss; transformers issue 35438")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("targets", ["ragged", "none-in-first-micro-batch"])
def test_the_reported_loss_is_the_mean_over_all_targets(world, subject, wrapper, targets):
    """The loss MUST be the mean over all valid tokens of the step on all ranks, on every rank.

    A part without a target that counts adds nothing to it: divided by its own count it is NaN.
    """
    job = Job(2, 2, world.size, steps=3, targets=targets)
    ranks = world.run(trained, wrapper, job)

    wrong = {name: alone(job, weighting=name).losses for name in ("means", "last")}
    judge.tensors(
        series(ranks, "loss"),
        as_series("loss", alone(job).losses),
        quantity="loss of each step",
        within=job.tolerance(),
        hints=[
            Hint("the mean of the micro-batches' means", as_series("loss", wrong["means"])),
            Hint("the last micro-batch's loss", as_series("loss", wrong["last"])),
        ],
        given=str(job),
    )


@clause("training.records.tokens", source="contract: tokens")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_reported_tokens_are_those_that_counted(world, subject, wrapper):
    """`tokens` MUST be the number of targets that counted in the step, on all ranks together."""
    job = Job(2, 2, world.size, steps=3, targets="ragged")
    ranks = world.run(trained, wrapper, job)

    judge.equal(
        field_of(ranks, "tokens"),
        [float(job.tokens(step)) for step in range(job.steps)],
        quantity="tokens of each step",
        given=str(job),
    )


@clause("training.records.grad-norm", source="contract: grad-norm")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_reported_norm_is_that_of_the_mean_gradient(world, subject, wrapper):
    """`grad_norm` MUST be the norm of the gradient that the update used, over all parameters."""
    job = Job(2, 2, world.size, steps=3)
    ranks = world.run(trained, wrapper, job)

    judge.tensors(
        series(ranks, "grad_norm"),
        as_series("grad_norm", alone(job).norms),
        quantity="gradient norm of each step",
        within=job.tolerance(),
        given=str(job),
    )


@clause(
    "training.records.norm-before-clipping",
    level="production",
    source="contract: norm-before; torch.nn.utils.clip_grad_norm_ returns the norm from before",
    worlds=(2,),
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_reported_norm_is_that_before_clipping(world, subject, wrapper):
    """Where gradients are clipped, `grad_norm` MUST be the norm before clipping.

    Afterwards it is max_norm in every line of the log, and a spike cannot be seen.
    """
    job = Job(2, 2, world.size, steps=2, max_norm=0.1)
    ranks = world.run(trained, wrapper, job)

    judge.tensors(
        series(ranks, "grad_norm"),
        as_series("grad_norm", alone(job).norms),
        quantity="gradient norm of each step",
        within=job.tolerance(),
        given=str(job),
    )


@clause("training.rate.pure-function-of-the-step", source="contract: schedule")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_update_uses_the_rate_of_its_step(world, subject, accumulate):
    """The update after k finished ones MUST use lr(k) in all groups, for any W and accumulation.

    Schedulers that are stepped per micro-batch, or once per rank, run through the schedule N or W
    times too fast. A warm-up begins at a rate of 0, which is a rate.
    """
    job = Job(1, accumulate, world.size, steps=4, rate=0.5, idle_step=0)
    ranks = world.run(trained, "ddp" if world.size > 1 else "plain", job)

    judge.equal(
        [rank["rates"] for rank in ranks],
        [job.schedule(step) for step in range(job.steps)],
        quantity="rates that the updates used",
        given=str(job),
    )


def rates_of_two_calls(ctx, wrapper, job):
    """Rates that the updates of two calls with one optimizer used; its groups have rates apart.

    The optimizer counts its own steps.
    """
    trainee = Trainee.of(ctx, wrapper, job.seed, kind=torch.optim.Adam)
    trainee.optimizer.param_groups[1]["lr"] = OWN_RATES[1]
    batches = Counted(job.micro_batches(ctx.rank))
    for _ in range(2):
        trainee.train(ctx, job, batches)
    return trainee.rates


def with_too_few_rates(ctx, wrapper, job):
    """Whether the call raised that was given a schedule of one step less."""
    trainee = Trainee.of(ctx, wrapper, job.seed)
    rates = iter([0.5] * (job.steps - 1))
    with refusal.caught(BaseException) as caught:
        ctx.impl.train(
            trainee.wrapped,
            trainee.optimizer,
            job.micro_batches(ctx.rank),
            steps=job.steps,
            global_batch_size=job.global_batch,
            micro_batch_size=job.micro_batch,
            lr=lambda step: next(rates),
        )
    return bool(caught["kinds"])


@clause(
    "training.rate.that-ends",
    level="production",
    source="contract: lr-ends; "
    "lr=lambda step: next(rates): a StopIteration ends a map or a generator in silence",
    worlds=(1, 2),
)
def test_a_schedule_that_ends_early_is_an_error(world, subject):
    """Where `lr` raises StopIteration the call MUST raise, and not end like a finished run."""
    job = Job(1, 1, world.size, steps=3)
    ranks = world.run(with_too_few_rates, "ddp" if world.size > 1 else "plain", job)

    judge.equal(ranks, True, quantity="whether it raised, the answer", given=str(job))


OWN_RATES = (1.0, 0.25)
CALLS = {"with-lr": 0.5, "without-lr": None}


@clause("training.rate.of-each-call", source="contract: schedule, own-rates")
@pytest.mark.parametrize("rate", CALLS)
def test_each_call_begins_its_schedule_anew(world, subject, rate):
    """Each call MUST start its schedule at lr(0), and without `lr` leave each group its rate.

    A call is a phase of training, and who gives no schedule has set the rates.
    """
    job = Job(1, 1, world.size, steps=2, rate=CALLS[rate])
    ranks = world.run(rates_of_two_calls, "ddp" if world.size > 1 else "plain", job)

    once = [job.schedule(step) if job.rate else [*OWN_RATES] for step in range(job.steps)]
    judge.equal(ranks, once * 2, quantity="rates that the updates used", given=str(job))


@clause(
    "training.rate.reported-is-used",
    source="contract: reported-lr; a course's loop reads it after the scheduler has moved on",
)
@pytest.mark.parametrize("given_by", ["function", "optimizer"])
def test_the_reported_rate_is_the_one_that_was_used(world, subject, given_by):
    """`lr` of a record MUST be the rate that its update used."""
    job = at(Job(2, 1, world.size, steps=3), rate=0.5 if given_by == "function" else None)
    ranks = world.run(trained, "ddp" if world.size > 1 else "plain", job)

    used = [as_series("lr", rank["rates"]) for rank in ranks]
    later = [as_series("lr", [*rank["rates"][1:], rank["rates"][-1]]) for rank in ranks]
    judge.tensors(
        series(ranks, "lr"),
        used,
        quantity="rate that each update used",
        within=rounding(torch.float32, terms=1),
        hints=[Hint("the next step's rate: read after it was set anew", later)],
        given=str(job),
    )
