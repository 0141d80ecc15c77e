"""Gradients: after the finish, `.grad` is the mean over the group of the local gradients.

This is the whole promise of data parallelism: the replicas behave like one process with the whole
batch. Wrong by a constant factor, Adam hides it; wrong in one parameter, the loss falls all the
same. All clauses here use exact arithmetic, so that every right implementation is bit-equal to the
oracle at any world size. See Li et al. 2020, section 3.2.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_tests.programs.alone import SEED
from spec_tests.programs.law import follow, judge_values, same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.programs.scene import REPLICAS, SMALL_BUCKET_MB
from spec_tests.programs.ways import Replicas, replicated
from spec_tests.rig import judge, strategies
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS, with_smallest_gradient

clause = clauses(judges=REPLICAS, level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)
PAPER = "Li et al. 2020, section 3.2.1"

test_mean = holds(
    "ddp.gradients.mean",
    "Every rank MUST hold the mean over ranks of the local gradients.",
    # Not the sum, not its own, not the mean divided once more. Every rank has other data, so that
    # nothing can be right by accident.
    {toy: f"{toy}: backward 0" for toy in ("mlp", "ragged")},
    level="course",
    source="contract: mean-gradient; " + PAPER,
    worlds=(2, 3, 4),
)

test_tied_parameter = holds(
    "ddp.gradients.tied-parameter",
    "A parameter used under two names MUST hold the mean of its complete gradient.",
    # A hook that fires for each use reduces a partial gradient, or the same one twice.
    "tied: backward 0",
    level="course",
    source="contract: mean-gradient; CS336 assignment 2, the tied toy model of its DDP tests",
)

test_reused_module = holds(
    "ddp.gradients.reused-module",
    "A module applied twice in one forward MUST hold the mean of its complete gradient.",
    "reused: backward 0",
    source="contract: mean-gradient; torch reducer: hooks on AccumulateGrad, not on uses",
)

test_frozen_stay_none = holds(
    "ddp.gradients.frozen-stay-none",
    "Frozen parameters MUST keep `grad is None`, and the others MUST hold the mean.",
    # A zero in place of None makes AdamW decay a weight that was meant to stay.
    "mlp not-the-ends: backward 0",
    level="course",
    source="contract: frozen-none; "
    "CS336 assignment 2, toy model with a frozen parameter; DistributedDataParallel",
    worlds=(3,),
)

test_dtype_and_layout = holds(
    "ddp.gradients.dtype-and-layout",
    "Gradients of any dtype and memory layout MUST land in the right positions, dtype kept.",
    # Channels-last, transposed, expanded with stride zero, float32 next to bfloat16 or float64:
    # flattening such a gradient may copy, and then the reduced values are written into the copy.
    {"mixed": "mixed: backward 0", "double": "two-dtypes: backward 0"}
    | {toy: f"{toy}: backward 0" for toy in ("conv", "strided")},
    source="contract: grad-dtype, any-layout; "
    "torch reducer: one bucket per dtype and device, stride contract of bucket views",
)

test_called_by_keyword = holds(
    "ddp.gradients.called-by-keyword",
    "A wrapped module MUST take the original's keyword arguments, and average as ever.",
    "branches keyword: backward 1",
    source="contract: called-alike; DistributedDataParallel.forward(*inputs, **kwargs)",
    worlds=(3,),
)

LARGE = 60000.0
"""Near the largest number of float16, 65504."""


def mean_of_large_gradients(ctx, subject):
    """A mean gradient that float16 holds, of gradients whose sum it does not."""
    module = torch.nn.Linear(4, 3, bias=False).to(ctx.device, torch.float16)
    wrapped = replicated(ctx, subject, module)
    ones = torch.ones(1, 4, device=ctx.device, dtype=torch.float16)
    (wrapped(ones) * LARGE).sum().backward()
    ctx.impl.finish_gradient_synchronization(wrapped)
    return {"weight": module.weight.grad}


@clause(
    "ddp.gradients.float16-does-not-overflow",
    level="production",
    source="contract: float16-sum; DistributedDataParallel divides before it adds up",
)
def test_a_mean_that_float16_holds_does_not_overflow_on_the_way(world, subject):
    """In float16 the mean of gradients of 60000 MUST be 60000, though their sum is beyond it."""
    judge.tensors(
        world.run(mean_of_large_gradients, subject),
        {"weight": torch.full((3, 4), LARGE, dtype=torch.float16)},
        quantity="mean gradient",
    )


def weights_around_backward(ctx, subject):
    """Weights before and after a synchronised backward, made different on each rank."""
    replica = Replicas(ctx, subject, "mlp not-the-ends")
    with torch.no_grad():
        for parameter in replica.plain:
            parameter.add_(ctx.rank)  # the mean of equal weights would change nothing
    before = replica.full()
    replica.backward("0")
    return before, replica.full()


@clause(
    "ddp.gradients.weights-untouched",
    source="contract: weights-stay; "
    "picotron issue 39: a post-accumulate hook receives the parameter, not the gradient",
    worlds=(2,),
)
def test_backward_changes_no_weight(world, subject):
    """Forward, backward and finish MUST leave every parameter as it was, frozen ones too.

    A post-accumulate hook is handed the *parameter*. Code that averages its argument averages the
    weights and leaves the gradients local, with a loss curve that looks plausible.
    """
    before, after = zip(*world.run(weights_around_backward, subject), strict=True)

    mean = {name: sum(rank[name] for rank in before) / world.size for name in before[0]}
    judge.tensors(
        after,
        before,
        quantity="weight from before backward",
        hints=[Hint("the mean of all ranks' weights: the hook averaged the parameter", mean)],
        given="mlp not-the-ends, weights changed on each rank after wrapping",
    )


test_finish_is_idempotent = holds(
    "ddp.gradients.finish-is-idempotent",
    "A second `finish_gradient_synchronization` MUST change no gradient.",
    "mlp: backward 0, finish",
    source="contract: finish_gradient_synchronization/called-again",
)

ORDINARY = "mlp: backward 0"


def late_peer(ctx, subject):
    """Rank 0's gradients right after its finish, while the last rank is late in every layer."""
    replica = Replicas(ctx, subject, "mlp")
    if ctx.rank == ctx.world_size - 1:
        for parameter in replica.plain:
            parameter.register_hook(lambda gradient: ctx.be_late(0.04))
    return replica.follow("backward 0")


@clause(
    "ddp.gradients.final-after-finish",
    source="contract: mean-gradient; "
    "c10d: asynchronous collectives complete in the background, wait() makes them final",
)
def test_gradients_are_final_when_finish_returns(world, subject):
    """When finish returns, gradients MUST be final, however late a peer is.

    The last rank sleeps in front of each of its gradients. Whoever drops a handle, or waits for one
    and takes it for all, reads its own numbers.
    """
    judge_values(world.run(late_peer, subject), subject, ORDINARY)


test_zero_grad_modes = holds(
    "ddp.gradients.zero-grad-modes",
    "After either way of `zero_grad` the next gradients MUST be the mean of the new ones alone.",
    # Views into a bucket are lost when the gradient is set to None; what the bucket still holds
    # must not be added in.
    {
        f"to-{how}": f"ragged: zero_grad {how}, backward 0, zero_grad {how}, backward 1, "
        f"zero_grad {how}, backward 2"
        for how in ("none", "zero")
    },
    source="contract: since-zero-grad; "
    "torch.optim.Optimizer.zero_grad, set_to_none; fairscale issue 354",
)

test_two_forwards_one_backward = holds(
    "ddp.gradients.two-forwards-one-backward",
    "Two forwards followed by one backward MUST give the mean of the complete gradients.",
    "mlp: both 0 1",
    source="contract: several-forwards; pytorch issue 175024",
)


def beside_unused(ctx, subject, bucket_size_mb):
    """Gradients of the second step, and what it raised once its forward had returned."""
    replica = Replicas(ctx, subject, "unused", bucket_size_mb=bucket_size_mb)
    replica.follow("backward 0, zero_grad none, forward 1")
    with refusal.caught() as late:
        replica.pending()
    return [("backward 1", replica.gradients())], late["error"]


@clause(
    "ddp.gradients.unused-everywhere",
    source="contract: unused-everywhere; "
    "DistributedDataParallel, find_unused_parameters; pytorch issue 128949",
)
@pytest.mark.parametrize("bucket_size_mb", [SMALL_BUCKET_MB, 1.0], ids=["apart", "together"])
def test_a_parameter_that_nobody_uses_never_hangs_the_step(world, subject, bucket_size_mb):
    """Unused on all ranks, a parameter MUST keep None, or be an error by the next forward.

    In one bucket with others, it keeps the bucket from ever being complete.
    """
    asked, ordinary = (beside_unused, subject, bucket_size_mb), (follow, subject, ORDINARY)
    ranks = refusal.answer_or_refusal(world, *asked, ordinary=ordinary)

    for _, late in ranks or ():
        judge.holds(not late, f"expected an error by the next forward, got it after that: {late}")
    if ranks is not None:
        judge_values([found for found, _ in ranks], subject, "unused: backward 1")


test_unused_somewhere = holds(
    "ddp.gradients.unused-somewhere",
    "Used on some ranks only, a parameter MUST hold the mean with zeros, or be an error.",
    # Dividing by the number of contributors is wrong; reducing only what one has pairs unrelated
    # tensors, or waits for ever. Zeros in another memory order than the peers' mix up a flat mean.
    {
        case: f"{toy}: zero_grad zero, backward 0, zero_grad none, backward 1"
        for case, toy in {
            "some": "branches-by-rank",
            "disjoint": "branches-apart",
            "strided": "strided-one-each",
        }.items()
    },
    source="contract: unused-somewhere; DistributedDataParallel, find_unused_parameters=True",
)


def nothing_used(ctx, subject, case):
    """Two steps in which the last rank's loss touches no parameter at all."""
    replica = Replicas(ctx, subject, "mlp")
    for micro in "01":
        replica.zero_grad("none")
        loss = replica.loss(micro)
        replica.evaluate(micro)  # of which no gradient comes
        if ctx.rank == ctx.world_size - 1:
            loss = torch.zeros((), requires_grad=True)
        elif case == "underflow-to-negative-zero":
            loss = 0 * loss + sum(0 * with_smallest_gradient(p).sum() for _, p in replica.named())
        loss.backward()
        replica.finish_backward()
    return {name: p.grad for name, p in replica.named()}


@clause(
    "ddp.gradients.unused-on-a-whole-rank",
    source="contract: no-hang, unused-somewhere",
    worlds=(2,),
)
@pytest.mark.parametrize("case", ["usual", "underflow-to-negative-zero"])
def test_a_rank_whose_loss_touches_nothing_hangs_nobody(world, subject, case):
    """Where a rank's loss touches no parameter, the others MUST NOT hang: mean or error.

    A batch without valid targets, a sample that is skipped: no hook fires on that rank. A mean of
    -0.0 is a gradient: an optimizer with weight decay acts on it, on all ranks or on none.
    """
    ordinary = (follow, subject, ORDINARY)
    ranks = refusal.answer_or_refusal(world, nothing_used, subject, case, ordinary=ordinary)

    if ranks is not None:
        others = [TOYS["mlp"].batch(SEED, rank=rank, micro=1) for rank in range(world.size - 1)]
        expected = oracle.gradients("mlp", SEED, others)
        if case != "usual":
            plain = oracle.parameters("mlp", SEED)
            expected = {name: torch.zeros_like(p) for name, p in plain.items()}
        judge.tensors(
            ranks, expected, quantity="mean gradient", given="the last rank uses no parameter"
        )


test_rank_dependent_order = holds(
    "ddp.gradients.rank-dependent-order",
    "Ranks whose gradients become ready in different orders MUST still hold the mean.",
    # Collectives are paired by position. Launching each as it becomes ready adds up unrelated
    # tensors in silence wherever the sizes agree.
    {
        case: f"branches-in-any-order {bucket}: backward 0, zero_grad none, backward 1, "
        "zero_grad none, backward 2"
        for case, bucket in {"mixed": "small", "alike": "of-a-branch"}.items()
    },
    source="contract: any-order; pytorch issues 72843 and 174862",
    worlds=(2, 3, 4),
)


def scaled_loss(ctx, subject, seed, exponent):
    """Gradients of a loss times a power of two, on real-valued float32 data."""
    replica = Replicas(ctx, subject, "mlp")
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed + ctx.rank))
    (replica.wrapped(batch.to(ctx.device)).square().sum() * 2.0**exponent).backward()
    replica.finish_backward()
    return replica.gradients()


@clause(
    "ddp.gradients.loss-scale-invariance",
    source="contract: mean-gradient; IEEE 754: scaling by a power of two commutes with rounding",
)
@given(seed=strategies.seeds, exponent=st.integers(-6, 6).filter(bool))
def test_a_power_of_two_on_the_loss_scales_the_gradients_exactly(world, subject, seed, exponent):
    """Multiplying the loss by 2**k MUST multiply every mean gradient by 2**k, bit for bit.

    Needs no reference, so it holds for any implementation: a constant that is added, a clip or a
    cast on the way shows.
    """
    plain = world.run(scaled_loss, subject, seed, 0)
    scaled = world.run(scaled_loss, subject, seed, exponent)

    judge.tensors(
        scaled,
        [{n: g if g is None else 2.0**exponent * g for n, g in rank.items()} for rank in plain],
        quantity=f"gradient times 2**{exponent}",
        given=f"float32, seed {seed}",
    )


test_single_rank = holds(
    "ddp.gradients.single-rank",
    "With a single rank the gradients MUST equal those of the bare module, bit for bit.",
    {toy: f"{toy}: backward 0" for toy in ("mlp", "tied")}
    | {"frozen": "mlp not-the-ends: backward 0"},
    source="contract: mean-gradient; design: a world of one is the plain module",
    worlds=(1,),
)
