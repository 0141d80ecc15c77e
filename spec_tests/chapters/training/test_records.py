"""Records: what is reported of a step is what happened in it, on all ranks together.

A loss curve is what people look at. Of the last micro-batch alone it is noisy, of rank 0 alone it
hides a rank that learns nothing, divided once more it is too good; a learning rate that is read
after the scheduler has moved on belongs to another step.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from spec_tests.chapters.training.loop import (
    TRAIN,
    WRAPPERS,
    Job,
    alone,
    as_series,
    each_has,
    field_of,
    series,
    trained,
    wrapper_at,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=TRAIN, level="correct", worlds=(1, 2))
RATES = "rates that the updates used"


@clause(
    "training.records.one-per-step",
    source="contract: records; a course's loop returned the last step only, and a test compared it",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_there_is_one_record_and_one_update_per_step(world, subject, wrapper):
    """`train` MUST do as many updates as it is asked for, and return one record of each."""
    job = Job(1, 3, world.size, steps=4)
    each_has(
        world,
        wrapper,
        job,
        lambda rank: [len(rank["records"]), len(rank["rates"])],
        [job.steps, job.steps],
        "number of records and of updates",
    )


@clause("training.records.loss", source="contract: loss; transformers issue 35438")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("targets", ["ragged", "none-in-first-micro-batch"])
def test_the_reported_loss_is_the_mean_over_all_targets(world, subject, wrapper, targets):
    """The loss MUST be the mean over all valid tokens of the step on all ranks, on every rank.

    A part without a target that counts adds nothing to it: divided by its own count it is NaN.
    """
    judge_losses(world, wrapper, Job(2, 2, world.size, steps=3, targets=targets))


@clause("training.records.loss-of-all-ranks", level="course", source="contract: one-process")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_reported_loss_is_of_all_ranks(world, subject, wrapper):
    """Where every target counts, the loss MUST be the mean over all ranks and micro-batches."""
    judge_losses(world, wrapper, Job(2, 2, world.size))


def judge_losses(world, wrapper, job):
    """The losses that every rank reports are those of one process."""
    __tracebackhide__ = True
    own = [alone(job, weighting=(rank,)) for rank in range(job.world_size)]
    wrong = {
        "the mean of the micro-batches' means": [alone(job, weighting="means")] * len(own),
        "the last micro-batch's loss": [alone(job, weighting="last")] * len(own),
        "the rank's own loss: the mean over ranks was not taken": own,
    }
    judge.tensors(
        series(world.run(trained, wrapper, job), "loss"),
        as_series("loss", alone(job).losses),
        quantity="loss of each step",
        within=job.tolerance(),
        hints=[
            Hint(means, [as_series("loss", each.losses) for each in ranks])
            for means, ranks in wrong.items()
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


def judge_norms(world, wrapper, job):
    """On every rank the norms that are reported are those of one process."""
    __tracebackhide__ = True
    judge.tensors(
        series(world.run(trained, wrapper, job), "grad_norm"),
        as_series("grad_norm", alone(job).norms),
        quantity="gradient norm of each step",
        within=job.tolerance(),
        given=str(job),
    )


@clause("training.records.grad-norm", source="contract: grad-norm")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_reported_norm_is_that_of_the_mean_gradient(world, subject, wrapper):
    """`grad_norm` MUST be the norm of the gradient that the update used, over all parameters."""
    job = Job(2, 2, world.size, steps=3)
    judge_norms(world, wrapper, job)


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
    judge_norms(world, wrapper, job)


@clause("training.rate.pure-function-of-the-step", source="contract: schedule")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_update_uses_the_rate_of_its_step(world, subject, accumulate):
    """The update after k finished ones MUST use lr(k) in all groups, for any W and accumulation.

    Schedulers that are stepped per micro-batch, or once per rank, run through the schedule N or W
    times too fast. A warm-up begins at a rate of 0, which is a rate.
    """
    job = Job(1, accumulate, world.size, steps=4, rate=0.5, idle_step=0)
    wanted = [job.schedule(step) for step in range(job.steps)]
    each_has(world, wrapper_at(world), job, itemgetter("rates"), wanted, RATES)


class TooFewRates:
    """A schedule of one step less: a StopIteration comes out of it."""

    def __init__(self, number):
        self.left = number

    def __call__(self, step):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return 0.5


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
    asked = {"lr": TooFewRates(job.steps - 1), "may_raise": BaseException}
    answer = "whether it raised, the answer"
    each_has(world, wrapper_at(world), job, lambda rank: bool(rank["kinds"]), True, answer, **asked)


OWN_RATES = (1.0, 0.25)
CALLS = {"with-lr": 0.5, "without-lr": None}


def set_own_rates(ctx, trainee):
    """Give the groups rates apart."""
    trainee.optimizer.param_groups[1]["lr"] = OWN_RATES[1]


@clause("training.rate.of-each-call", source="contract: schedule, own-rates")
@pytest.mark.parametrize("rate", CALLS)
def test_each_call_begins_its_schedule_anew(world, subject, rate):
    """Each call MUST start its schedule at lr(0), and without `lr` leave each group its rate.

    A call is a phase of training, and who gives no schedule has set the rates.
    """
    job = Job(1, 1, world.size, steps=2, rate=CALLS[rate])
    # The optimizer counts its own steps.
    asked = {"kind": torch.optim.Adam, "before": set_own_rates, "calls": (job.steps,) * 2}
    once = [job.schedule(step) if job.rate else [*OWN_RATES] for step in range(job.steps)]
    each_has(world, wrapper_at(world), job, itemgetter("rates"), once * 2, RATES, **asked)


@clause(
    "training.rate.reported-is-used",
    source="contract: reported-lr; a course's loop reads it after the scheduler has moved on",
)
@pytest.mark.parametrize("given_by", ["function", "optimizer"])
def test_the_reported_rate_is_the_one_that_was_used(world, subject, given_by):
    """`lr` of a record MUST be the rate that its update used."""
    job = replace(Job(2, 1, world.size, steps=3), rate=0.5 if given_by == "function" else None)
    ranks = world.run(trained, wrapper_at(world), job)

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
