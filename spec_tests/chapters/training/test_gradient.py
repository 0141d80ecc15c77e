"""Gradient: what one process with the whole batch would do, however the batch is cut.

The gradient of a step is that of the sum of all losses over the number of all targets that count,
on all ranks and in all micro-batches. The mean of the micro-batches' means is something else as
soon as one sequence is padded, by tens of per cent, and every large trainer has had that bug.
Judged with SGD: Adam hides a wrong scale.

Clipping: once per step, by the norm of the gradient that the optimizer sees.

Clipping each micro-batch, or each rank's part, changes the direction of the step and not only its
length: by 0.8 of it in an experiment. See Pascanu et al. 2013 and torch.nn.utils.clip_grad_norm_.

Surroundings: batches come as slices of longer rows, and a process group need not be the world that
a launcher wrote into the environment.

Traffic: one copy of the gradients per optimizer step, however many micro-batches there are. The
famous defect: `no_sync` around the backward alone. DistributedDataParallel decides in the *forward*
whether to reduce, so every micro-batch is reduced; the numbers are right, the traffic is N times
what it should be. The reverse, the forward alone, sends nothing at all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from spec_tests.chapters.training.loop import (
    TRAIN,
    WRAPPERS,
    Job,
    ToyLanguageModel,
    Trainee,
    alone,
    trained,
    wrapper_at,
)
from spec_tests.programs.laws import refusal, traffic
from spec_tests.rig import judge, strategies
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(judges=TRAIN, level="correct", worlds=(2, 3))

TOKENS = "transformers issues 34191 and 34242; torchtune issue 1875"


def judged(world, wrapper, job, *, given="", **asked):
    """Every rank's step is that of one process with the whole batch.

    Args:
        asked: of `trained`.
    """
    __tracebackhide__ = True
    judge_weights(world.run(trained, wrapper, job, **asked), job, given)


def judge_weights(ranks, job, given):
    """The same of ranks that have trained."""
    __tracebackhide__ = True
    right = alone(job)
    start = right.weights[0]
    wrong = {
        "means": "the mean of the micro-batches' means: padding weighs as much as text",
        "last": "the last micro-batch alone: the earlier ones were lost",
        "share": "the last micro-batch's share alone: the others ran no backward, or were cleared",
    }
    judge.tensors(
        [_change(rank["weights"], start) for rank in ranks],
        _change(right.last, start),
        quantity="change of weights",
        within=job.tolerance(),
        hints=[
            Hint(means, _change(alone(job, weighting=name).last, start))
            for name, means in wrong.items()
        ],
        given=", ".join(filter(None, [str(job), given])),
    )


def _change(after, before):
    # The negative, which for a single step of SGD with rate one is the gradient itself.
    return {name: before[name] - after[name] for name in before}


@clause("training.gradient.plain-model", level="course", source="contract: plain", worlds=(1,))
@given(micro=st.integers(1, 3), accumulate=st.integers(1, 4), seed=strategies.seeds)
@example(micro=1, accumulate=4, seed=7)
def test_micro_batches_add_up_to_the_whole_batch(world, subject, micro, accumulate, seed):
    """A plain model MUST train as on whole batches, into however many micro-batches they are cut.

    Without a division by their number the step is N times too long; Adam would not show it.
    """
    job = Job(micro, accumulate, seed=seed)
    judged(world, "plain", job)


@clause(
    "training.gradient.equals-one-process",
    level="course",
    source="contract: one-process; Li et al. 2020, section 3: replicas equal to local training",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@given(micro=st.integers(1, 3), accumulate=st.integers(1, 3), seed=strategies.seeds)
@example(micro=1, accumulate=3, seed=7)
def test_ranks_train_as_one_process_does(world, subject, wrapper, micro, accumulate, seed):
    """Wrapped, a model MUST train as one process does on the union of all ranks' batches.

    For every way to cut the batch into ranks and micro-batches. The losses are scaled for the mean
    over ranks exactly once, or not at all.
    """
    job = Job(micro, accumulate, world.size, seed=seed)
    judged(world, wrapper, job)


@clause("training.gradient.several-steps", level="course", source="contract: plain", worlds=(1, 2))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_step_starts_without_old_gradients(world, subject, wrapper):
    """Several steps MUST end where one process ends: no gradient is carried into the next step.

    Every target counts here; what those weigh that are left is `training.gradient.token-weighted`.
    """
    job = Job(2, 2, world.size, steps=4)
    judged(world, wrapper_at(world, wrapper), job)


@clause("training.gradient.token-weighted", source="contract: one-process; " + TOKENS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@given(micro=st.integers(1, 2), accumulate=st.integers(1, 3), seed=strategies.seeds)
@example(micro=1, accumulate=2, seed=7)
def test_every_target_weighs_the_same(world, subject, wrapper, micro, accumulate, seed):
    """Every target that counts MUST weigh the same, whichever rank and micro-batch it is in.

    Sequences are masked with -100 to lengths between zero and all. A mean of means is off by 0.2 to
    0.9 of the gradient here, and of the loss that is reported.
    """
    job = Job(micro, accumulate, world.size, seed=seed, targets="ragged")
    judged(world, wrapper, job)


@clause(
    "training.gradient.nothing-to-learn-here",
    source="contract: one-process; a local mean over no target is NaN",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("where", ["none-on-last-rank", "none-in-first-micro-batch"])
def test_a_part_without_targets_contributes_nothing(world, subject, wrapper, where):
    """A rank or micro-batch without a target that counts MUST contribute zero, and take part.

    Dividing by its own count gives NaN; skipping its backward leaves the others waiting.
    """
    job = Job(2, 2, world.size, steps=2, targets=where)

    judged(world, wrapper, job)


def fill_gradients(ctx, trainee):
    """Leave gradients full, as somebody did."""
    for parameter in trainee.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0 + ctx.rank)


@clause(
    "training.gradient.leftovers-do-not-count",
    source="contract: leftovers; zero_grad only after the step",
    worlds=(1, 2),
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_from_before_do_not_count(world, subject, wrapper):
    """Gradients that are there when `train` is called MUST NOT enter the first step."""
    job = Job(2, 2, world.size)
    given = "gradients left full before the call"
    judged(world, wrapper, job, given=given, before=fill_gradients)


def held_by_one(ctx, holder, job):
    """The norm, and a parameter of model or optimizer alone with a gradient from before."""
    trainee = Trainee.of(ctx, "plain", job.seed)
    extra = nn.Parameter(torch.ones(3, device=ctx.device))
    extra.grad = torch.full_like(extra, 3.0)
    if holder == "optimizer":
        trainee.optimizer.add_param_group({"params": [extra]})
    else:
        trainee.model.register_parameter("extra", extra)
    [record] = trainee.train(ctx, job, job.micro_batches(ctx.rank))
    norm = torch.tensor(record["grad_norm"], dtype=torch.float64)
    return {"extra": extra.detach().clone(), "norm": norm}


@clause(
    "training.gradient.leftovers-outside-the-model",
    level="production",
    source="contract: leftovers; model.zero_grad() does not reach what the optimizer alone holds, "
    "nor optimizer.zero_grad() what the model alone holds",
    worlds=(1,),
)
@pytest.mark.parametrize("holder", ["optimizer", "model"])
def test_gradients_of_what_only_one_of_them_holds_do_not_count(world, subject, holder):
    """A parameter of only the optimizer, or only the model, MUST NOT bring an earlier gradient."""
    job = Job(2, 1, world.size, max_norm=1e3)
    ranks = world.run(held_by_one, holder, job)

    judge.tensors(
        ranks,
        {"extra": torch.ones(3), "norm": torch.tensor(alone(job).norms[0], dtype=torch.float64)},
        quantity="value from before, and norm of the gradient",
        within=job.tolerance(),
        given=f"a parameter that only the {holder} holds",
    )


def in_a_group(ctx, job):
    """Weights of the ranks that train together; the last one takes no part."""
    group = ctx.split([range(job.world_size), range(job.world_size, ctx.world_size)])
    if ctx.rank >= job.world_size:
        return {}
    trainee = Trainee.of(ctx, "ddp", job.seed, process_group=group)
    trainee.train(ctx, job, job.micro_batches(ctx.rank))
    return {"weights": trainee.weights()}


@clause(
    "training.gradient.in-a-group",
    level="production",
    needs=("train", "ddp"),
    source="contract: group-model",
    worlds=(3,),
)
def test_the_ranks_of_a_step_are_those_of_the_wrappers_group(world, subject):
    """A model whose wrapper got a process group MUST be trained by the ranks of that group."""
    job = Job(2, 2, world.size - 1, targets="ragged")
    ranks = world.run(in_a_group, job)[: job.world_size]
    judge_weights(ranks, job, given="the last rank takes no part")


@clause(
    "training.gradient.two-calls-are-one",
    source="contract: takes, leftovers; "
    "a course's trainer leaves gradients behind for the next call",
    worlds=(1, 2),
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_in_two_calls_is_training_in_one(world, subject, wrapper):
    """Two calls over one iterator MUST train like one call with the sum of their steps."""
    job = Job(1, 3, world.size, steps=4)
    judged(world, wrapper, job, given="1 and 3 steps", calls=(1, 3))


TORCH = "torch.nn.utils.clip_grad_norm_"
# torch adds 1e-6 to the norm before it divides; other right code does not.
EPSILON = 1e-6


def judge_clipped(world, wrapper, job):
    """Every rank's weights are those of one process that clips once."""
    __tracebackhide__ = True
    right = alone(job)
    slack = EPSILON / min(right.norms) * job.steps
    judge.tensors(
        [rank["weights"] for rank in world.run(trained, wrapper, job)],
        right.last,
        quantity="weight after clipped steps",
        within=job.tolerance().plus(slack, "1e-6 beside the norm"),
        given=f"{job}, norms {[round(norm, 3) for norm in right.norms]}",
    )


@clause("training.clip.once-per-step", source="contract: clips-once; " + TORCH, worlds=(1, 2, 3))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_whole_mean_gradient_is_clipped_once(world, subject, wrapper):
    """With max_norm the whole, reduced gradient MUST be clipped once, after all micro-batches."""
    job = Job(2, 2, world.size, steps=2, targets="ragged", max_norm=0.1)
    judge_clipped(world, wrapper, job)


@clause(
    "training.clip.leaves-small-gradients", source="contract: clips-once; " + TORCH, worlds=(2,)
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_gradient_below_the_bound_is_left_alone(world, subject, wrapper):
    """A gradient whose norm is below max_norm MUST be left as it is, neither cut nor stretched."""
    job = Job(2, 2, world.size, steps=2)
    bound = 1.05 * max(alone(job).norms)
    judge_clipped(world, wrapper, replace(job, max_norm=bound))


@clause(
    "training.clip.to-nothing",
    level="production",
    source="contract: max-norm-zero; " + TORCH,
    worlds=(1, 2),
)
def test_a_bound_of_zero_leaves_the_weights(world, subject):
    """With a max_norm of 0 the weights MUST keep their values, or the call raises.

    `if max_norm:` takes it for no bound at all.
    """
    job = Job(2, 1, world.size, max_norm=0.0)
    wrapper = wrapper_at(world, "ddp")
    ordinary = (trained, wrapper, replace(job, max_norm=1.0))
    ranks = refusal.answer_or_refusal(world, trained, wrapper, job, ordinary=ordinary)

    if ranks is not None:
        start = alone(job).weights[0]
        judge.tensors([rank["weights"] for rank in ranks], start, quantity="weight from before")


@clause(
    "training.clip.of-shards",
    level="production",
    needs=("train", "fully_shard"),
    source="contract: sharded-model, clips-once; "
    "torch.nn.utils.clip_grad_norm_ on DTensors: its norm is this rank's part",
    worlds=(2,),
)
def test_the_gradient_of_shards_is_clipped_by_the_norm_of_the_whole(world, subject):
    """With max_norm, a model that `fully_shard` sharded MUST be clipped by the whole norm."""
    job = Job(2, 1, world.size, steps=2, max_norm=0.1)
    judge_clipped(world, "fully_shard", job)


LIE = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"}


@clause(
    "training.gradient.world-of-the-group",
    source="contract: world; a course's trainer divides by WORLD_SIZE",
    worlds=(2,),
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_process_group_says_how_many_ranks_there_are(world, subject, wrapper):
    """The number of ranks MUST be read from the process group, not from the environment.

    The two differ in a notebook, under a custom launcher, and on a sub-group.
    """
    job = Job(2, 2, world.size, steps=2)
    judged(world, wrapper, job, given="WORLD_SIZE=5 in the environment", environment=LIE)


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
    judged(world, "torch", job, given="torch.nn.parallel.DistributedDataParallel")


def sliced(batch):
    """The same ids and targets as slices of longer rows."""
    return tuple(nn.functional.pad(rows, (1, 1))[:, 1:-1] for rows in batch)


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
    judged(world, wrapper_at(world), job, given="slices of longer rows", each=sliced)


def sent(ctx, wrapper, job):
    """What a call of `train` sends, after a first one in which a wrapper may settle."""
    trainee = Trainee.of(ctx, wrapper, job.seed)
    batches = job.micro_batches(ctx.rank)
    trainee.train(ctx, job, batches)
    with ctx.recording() as recorder:
        trainee.train(ctx, job, batches)
    return recorder.log()


@clause(
    "training.traffic.one-reduction-per-step",
    level="production",
    source="contract: one-reduction; "
    "accelerate issue 1726, sentence-transformers issue 4027, speechbrain issue 1802",
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
        by_hand=True,
        likely="forward outside of no_sync, or no_sync not used: every micro-batch is reduced",
        given=str(job),
    )
