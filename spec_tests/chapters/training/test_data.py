"""Data: a loop takes exactly the batches that it uses, and stops alike on all ranks when they end.

A batch that is fetched and thrown away is lost to the run that resumes. A step with half of its
micro-batches, scaled as if it had all, is a wrong step. And a rank that stops alone leaves its
peers in a collective.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from spec_tests.chapters.training import loop
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=loop.TRAIN, level="correct", worlds=(1, 2))


@clause(
    "training.data.takes-what-it-uses",
    source="contract: takes; a course's loop fetched 21 batches for 20",
)
@pytest.mark.parametrize("wrapper", loop.WRAPPERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_exactly_the_batches_of_the_steps_are_taken(world, subject, wrapper, accumulate):
    """n steps MUST take n times the accumulated micro-batches from the iterator, and no more.

    Otherwise a loader's state after n steps is not that of n steps, and a resumed run loses data.
    """
    job = loop.Job(1, accumulate, world.size, steps=3)
    wanted = job.steps * accumulate
    loop.each_has(world, wrapper, job, itemgetter("taken"), wanted, "number of batches taken")


@clause(
    "training.data.refuses-a-remainder",
    source="contract: remainder; a course's loop floors and trains with less",
    worlds=(1, 2, 3),
)
def test_a_global_batch_that_does_not_divide_is_refused(world, subject):
    """A global batch that ranks and micro-batch do not divide MUST be a ValueError, with no update.

    On all ranks: nobody goes on alone.
    """
    job = loop.Job(2, 2, world.size, steps=2)
    asked = {"global_batch_size": job.global_batch + 1, "may_raise": Exception}
    for rank, found in enumerate(world.run(loop.trained, "ddp", job, **asked)):
        judge.holds(
            "ValueError" in found["kinds"] and not found["rates"],
            f"rank {rank}: expected a ValueError before any update, got "
            f"{(found['kinds'] or ['no error'])[0]} after {len(found['rates'])} updates",
            given=f"global batch {job.global_batch + 1}, micro-batch 2, {world.size} ranks",
        )


def cut_short(world, wrapper, job, ends=None):
    """What `train` leaves on each rank where a rank's data end after `ends[rank]` micro-batches."""
    ends = ends or [job.steps * job.accumulate] * world.size
    return world.run(loop.trained, wrapper, job, ends=ends, may_raise=Exception)


@clause(
    "training.data.no-partial-step-in-silence",
    source="contract: short-step; Lightning issue 19987, NeMo pull request 2257",
)
@pytest.mark.parametrize("left", [1, 2])
def test_a_step_without_all_its_data_is_not_taken_as_if_it_had_them(world, subject, left):
    """When data end within a step, that step MUST NOT be scaled as if it had been whole.

    It may be left out, or be taken with the mean over what it has, or the call may raise, before
    that step or, having looked at what there is, before the first.
    """
    job = loop.Job(1, 3, world.size, steps=3)
    ranks = cut_short(world, "ddp", job, [2 * job.accumulate + left] * world.size)

    start, _, whole = loop.alone(replace(job, steps=2)).weights
    partial = loop.alone(job, last_has=left).last
    for rank, found in enumerate(ranks):
        allowed = (whole, partial, *([start] if found["kinds"] else []))
        judge.holds(
            any(_is_close(found["weights"], right, job) for right in allowed),
            f"rank {rank}: expected the weights of 2 whole steps, or of these and a third with the "
            f"mean over the {left} it has, got neither (error: {found['kinds'][:1]})",
            likely="the partial step was scaled by the full number of micro-batches, or filled up",
            given=f"{job}, data for 2 steps and {left} micro-batches",
        )


def _is_close(weights, right, job):
    return all(
        float((weights[name] - right[name]).abs().max()) <= job.tolerance().bound(right[name])
        for name in right
    )


@clause(
    "training.data.ranks-end-together",
    level="production",
    source="contract: short-step; "
    "torch.distributed.algorithms.Join; a loader that gives one rank a batch less",
    worlds=(2, 3),
)
def test_no_rank_is_left_waiting_when_ones_data_end(world, subject):
    """When one rank's data end before the others', all MUST stop at the same step, none hang."""
    job = loop.Job(1, 2, world.size, steps=3)
    ends = [job.steps * job.accumulate] * (world.size - 1) + [job.accumulate + 1]
    ranks = cut_short(world, "ddp", job, ends)

    judge.same_on_all_ranks([rank["weights"] for rank in ranks], quantity="weight")
    judge.equal(
        [not rank["kinds"] for rank in ranks],
        not ranks[0]["kinds"],
        quantity="went on without an error:",
        given=f"micro-batches per rank {ends}",
    )


@clause(
    "training.finite.decided-together",
    source="contract: alike; "
    "torchtitan asserts on a reduced value; a check of rank 0's loss sees rank 0",
    worlds=(2, 3),
)
@pytest.mark.parametrize("wrapper", loop.WRAPPERS)
@pytest.mark.parametrize("poison", ["nan", "inf", "gradient"])
def test_ranks_agree_on_what_a_nan_on_one_of_them_means(world, subject, wrapper, poison):
    """A NaN on one rank MUST have one effect on all: raise, skip or continue, and never hang.

    So must a loss that is infinite where its gradient is not, and the other way round.
    """
    job = loop.Job(2, 2, world.size, steps=3, poisoned_step=1, poison=poison)
    ranks = cut_short(world, wrapper, job)

    judge.equal(
        [(not rank["kinds"], len(rank["records"])) for rank in ranks],
        (not ranks[0]["kinds"], len(ranks[0]["records"])),
        quantity="went on without an error, number of records:",
        given=f"{poison} on the last rank in step 1, {job}",
    )
    judge.same_on_all_ranks(
        [{n: w.nan_to_num(nan=12345.0) for n, w in rank["weights"].items()} for rank in ranks],
        quantity="weight",
    )


@clause(
    "training.finite.spares-the-weights",
    level="production",
    source="contract: finite, alike; "
    "torch.nn.utils.clip_grad_norm_, error_if_nonfinite; a NaN norm spreads by clipping",
    worlds=(2,),
)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_nan_never_reaches_the_weights(world, subject, max_norm):
    """A step whose loss is not finite MUST NOT reach the weights."""
    job = loop.Job(2, 2, world.size, steps=3, poisoned_step=1, max_norm=max_norm)
    for rank, found in enumerate(cut_short(world, "ddp", job)):
        bad = [name for name, weight in found["weights"].items() if not weight.isfinite().all()]
        judge.holds(not bad, f"rank {rank}: {bad} are not finite any more", given=str(job))


def batches_afterwards(ctx, wrapper, job):
    """Whether each batch that the loop was given is what it was."""
    trainee = loop.Trainee.of(ctx, wrapper, job.seed)
    given = list(job.micro_batches(ctx.rank, end=job.steps))
    trainee.train(ctx, job, iter(given))
    was = job.micro_batches(ctx.rank, end=job.steps)
    return [
        torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(given, was, strict=True)
    ]


@clause(
    "training.data.stays-the-callers",
    level="production",
    source="contract: batches-stay; the next epoch may bring the same tensors",
    worlds=(1, 2),
)
def test_what_a_batch_holds_stays_as_it_was(world, subject):
    """Ids and targets MUST be as they were after a step, those that do not count as well."""
    job = loop.Job(2, 2, world.size, steps=2, targets="ragged")
    ranks = world.run(batches_afterwards, loop.wrapper_at(world), job)

    judge.equal(
        ranks, [True] * (job.steps * job.accumulate), quantity="whether each batch stayed as it was"
    )
