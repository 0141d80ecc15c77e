"""Accumulation: several micro-batches, one reduction. The quietest of all faults are here.

A reduction on every micro-batch costs N times the traffic and no digit. A micro-batch that stays
local lets replicas drift apart. PyTorch's wrapper decides in the *forward*, so the contract, and
each clause, has forward and backward inside `no_sync`. See Li et al. 2020, section 3.2.4.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import example, given
from torch import nn

from spec_tests.chapters.ddp.replica import DDP, SEED, Replica, mean_gradients, wrap
from spec_tests.chapters.ddp.replica import SMALL_BUCKET_MB as SMALL
from spec_tests.programs.laws import equivalence, traffic
from spec_tests.rig import judge, strategies
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import fingerprint, oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.ranks.recorder import Kind
from spec_tests.rig.toys import sum_of_squares

clause = clauses(judges=DDP, needs=("no_sync",), level="correct", worlds=(2, 3))
NO_SYNC = "DistributedDataParallel.no_sync; Li et al. 2020, section 3.2.4"


def silent_window(ctx, subject, toy, steps_before):
    """What is sent by a micro-batch inside no_sync, at the start or after some steps."""
    replica = Replica(ctx, subject, toy)
    for micro in range(steps_before):
        replica.follow(f"zero_grad, backward {micro}")
    with ctx.recording() as recorder:
        replica.follow("accumulate 8, accumulate 9")
    return recorder.log()


@clause("ddp.no-sync.sends-nothing", source="contract: silent; " + NO_SYNC)
@pytest.mark.parametrize("toy", ["mlp", "buffers"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_nothing_is_sent_inside_no_sync(world, subject, toy, steps_before):
    """Forward and backward inside `no_sync` MUST send nothing, buffers included.

    The numbers are right either way: only a look at the traffic tells.
    """
    logs = world.run(silent_window, subject, toy, steps_before)
    reduces = "no_sync is ignored, or read too late: the reduction was already armed in forward"
    are_buffers = any(log.collectives(Kind.BROADCAST) for log in logs)
    traffic.silent(
        logs,
        when="inside no_sync",
        likely="buffers are sent in every training forward" if are_buffers else reduces,
        given=f"toy {toy!r}, after {steps_before} ordinary steps",
    )


def local_window(ctx, subject, toy):
    """Gradients in the middle of a window, and what a bare module would have."""
    replica = Replica(ctx, subject, toy)
    wrapped = replica.gradients_after("accumulate 0, accumulate 1")
    return wrapped, replica.local_gradients((0, 1))


@clause("ddp.no-sync.keeps-local-sums", source="contract: local-sums; " + NO_SYNC)
@pytest.mark.parametrize("toy", ["ragged", "tied"])
def test_gradients_inside_no_sync_are_plain_local_sums(world, subject, toy):
    """Inside `no_sync` `.grad` MUST hold the plain sum of this rank's gradients, not yet divided.

    Dividing what has accumulated on each micro-batch weighs the early ones less and less.
    """
    wrapped, bare = zip(*world.run(local_window, subject, toy), strict=True)

    judge.tensors(
        wrapped,
        bare,
        quantity="local sum of two micro-batches",
        given=f"toy {toy!r}, seed 7, inside no_sync",
    )


def original_alone(ctx, subject):
    """Between two steps, two backwards of the module that was wrapped: what they sent and left."""
    replica = Replica(ctx, subject, "mlp")
    replica.follow("backward 0, zero_grad")
    with ctx.recording() as sent:
        for micro in (1, 2):
            loss = sum_of_squares(replica.module(replica.batch(micro)))
            (ctx.world_size * loss).backward()
    left, local = replica.gradients(), replica.local_gradients((1, 2))
    return sent.log(), left, local, replica.gradients_after("zero_grad, backward 3")


@clause(
    "ddp.no-sync.original-alone",
    level="production",
    source="contract: original-alone, original-local; "
    "DistributedDataParallel, prepare_for_backward: its forward arms the reducer",
)
def test_a_backward_of_the_original_alone_stays_local(world, subject):
    """Backwards of the original module alone MUST send nothing and leave local sums."""
    logs, left, bare, after = zip(*world.run(original_alone, subject), strict=True)

    likely = "hooks send whether or not the wrapper's forward came before"
    traffic.silent(logs, when="without a forward of the wrapper", likely=likely)
    judge.tensors(left, bare, quantity="local sum of two micro-batches")
    equivalence.mean_gradients(after, "mlp", SEED, micros=(3,))


@clause(
    "ddp.accumulation.equals-big-batch",
    source="contract: since-zero-grad; " + NO_SYNC,
    worlds=(2, 3, 4),
)
@pytest.mark.parametrize("micros", [2, 4, 1], ids=["2", "4", "1-after-a-window-of-3"])
def test_accumulated_micro_batches_equal_one_big_batch(world, subject, micros):
    """N micro-batches, the last synchronised, MUST give the mean gradient of them all."""
    early = "".join(f"accumulate {micro}, " for micro in range(micros - 1))
    if micros == 1:  # a count of the first window's hooks is never reached: pytorch pull 187732
        early = "accumulate 5, accumulate 6, backward 7, zero_grad, "
    mean_gradients(world, subject, "ragged", f"{early}backward {micros - 1}")


@clause("ddp.accumulation.any-schedule", source="contract: since-zero-grad; DeepSpeed issue 7985")
@given(flags=strategies.schedules(), seed=strategies.seeds)
@example(flags=(True, True, True), seed=7)
@example(flags=(True, False, True), seed=7)
def test_any_schedule_of_synchronisation_gives_the_same_gradient(world, subject, flags, seed):
    """Whichever micro-batches are synchronised, the gradient MUST be the mean of them all.

    Reduced values are equal on all ranks, so the mean leaves them alone. A sum on each micro-batch
    with one division at the end counts the early ones W times over.
    """
    words = ("backward" if is_synchronised else "accumulate" for is_synchronised in flags)
    mean_gradients(
        world,
        subject,
        "mlp",
        ", ".join(f"{word} {micro}" for micro, word in enumerate(words)),
        seed=seed,
        # A mean of means is no integer any more: the exact arithmetic ends with the first one.
        within=rounding(torch.float32, terms=24 * world.size, depth=len(flags)),
    )


class Tagged(nn.Module):
    """A parameter whose gradient is whatever number the forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5))
        self.second = nn.Parameter(torch.zeros(40))

    def forward(self, tag: float) -> torch.Tensor:
        return tag * (self.first.sum() + self.second.sum())


def tagged(ctx, subject, micros):
    """Mean gradient of contributions that encode rank and micro-batch."""
    module = Tagged().to(ctx.device)
    parameters = dict(module.named_parameters())
    wrapped = wrap(ctx, subject, module)
    for micro in range(micros):
        tag = ctx.world_size * fingerprint.contribution(ctx.rank * micros + micro)
        if micro < micros - 1:
            with ctx.impl.no_sync(wrapped):
                wrapped(tag).backward()
        else:
            wrapped(tag).backward()
            ctx.impl.finish_gradient_synchronization(wrapped)
    return {name: [] if p.grad is None else p.grad.tolist() for name, p in parameters.items()}


@clause(
    "ddp.accumulation.nothing-lost",
    source="contract: since-zero-grad; "
    "open-instruct pull request 1498, InfiniTrain pull request 183",
)
def test_every_contribution_arrives_exactly_once(world, subject):
    """Every rank's every micro-batch MUST arrive exactly once, in every element, on every rank.

    The gradients are numbers in base 4 whose digits count the contributions.
    """
    micros = 4
    ranks = world.run(tagged, subject, micros)

    names = tuple(f"rank {r} micro-batch {m}" for r in range(world.size) for m in range(micros))
    for rank, gradients in enumerate(ranks):
        for name, values in gradients.items():
            judge.holds(bool(values), f"rank {rank}, {name!r}: expected a gradient, got None")
            counts = {fingerprint.digits(value, contributors=len(names)) for value in values}
            wrong = next((c for c in counts if c != (1,) * len(names)), (1,) * len(names))
            judge.holds(
                counts == {(1,) * len(names)},
                f"rank {rank}, {name!r}: expected each of {len(names)} contributions once, got "
                f"{fingerprint.story(wrong, names)}",
            )


def after_exception(ctx, subject):
    """Gradients of an ordinary step after the body of no_sync has raised."""
    replica = Replica(ctx, subject, "mlp")
    with contextlib.suppress(KeyError), replica.no_sync():
        raise KeyError("planted")
    return replica.gradients_after("backward 0")


@clause(
    "ddp.no-sync.restores-after-exception",
    source=f"contract: restores; {NO_SYNC}; a context manager without try/finally, as in picotron",
    worlds=(3,),
)
def test_an_exception_inside_no_sync_does_not_leave_it_on(world, subject):
    """After the body of `no_sync` has raised, the next backward MUST be reduced.

    Otherwise one caught out-of-memory error lets the replicas drift apart for ever.
    """
    ranks = world.run(after_exception, subject)

    equivalence.mean_gradients(ranks, "mlp", SEED, given="after an exception inside no_sync")


def nested(ctx, subject):
    """What is sent in the outer window after the inner one closed, and gradients at the end."""
    replica = Replica(ctx, subject, "mlp")
    with ctx.recording() as recorder, replica.no_sync():
        replica.accumulate(0)
        replica.loss(1).backward()
    return recorder.log(), replica.gradients_after("backward 2")


@clause(
    "ddp.no-sync.nests",
    source=f"contract: nests; {NO_SYNC}; picotron restores a constant, not the previous value",
    worlds=(3,),
)
def test_an_inner_window_does_not_end_the_outer_one(world, subject):
    """Leaving a nested `no_sync` MUST restore the outer one, which still sends nothing."""
    logs, gradients = zip(*world.run(nested, subject), strict=True)

    traffic.silent(
        logs,
        when="in the outer no_sync",
        likely="the inner exit switches synchronisation on, in place of restoring what was before",
    )
    equivalence.mean_gradients(gradients, "mlp", SEED, micros=(0, 1, 2), given="nested no_sync")


@clause(
    "ddp.accumulation.zero-grad-discards",
    source="contract: since-zero-grad; LongCat-Image issue 46",
    worlds=(3,),
)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_zero_grad_inside_a_window_discards_what_was_pending(world, subject, set_to_none):
    """`zero_grad` after a window MUST discard what was pending: no hidden accumulator."""
    clear = f"zero_grad {set_to_none}"
    both = equivalence.full_batch_gradients("mlp", SEED, ranks=range(world.size), micros=(0, 1))
    mean_gradients(
        world,
        subject,
        "mlp",
        f"backward 5, {clear}, accumulate 0, {clear}, backward 1",
        hints=[Hint("the discarded micro-batch is still in it: a hidden accumulator", both)],
    )


def evaluated(ctx, subject):
    """Gradients of a step with evaluation forwards inside and after the window."""
    replica = Replica(ctx, subject, "mlp")
    replica.accumulate(0)
    with replica.no_sync():
        replica.evaluate(7)
    replica.evaluate(7)
    replica.loss(1).backward()
    return replica.gradients_after("evaluate 7, finish, evaluate 7")


@clause(
    "ddp.accumulation.evaluation-in-between", source="contract: evaluation; " + NO_SYNC, worlds=(2,)
)
def test_an_evaluation_forward_disturbs_nothing(world, subject):
    """A forward without gradients, inside or outside a window, MUST change no gradient."""
    ranks = world.run(evaluated, subject)

    equivalence.mean_gradients(ranks, "mlp", SEED, micros=(0, 1), given="evaluation in between")


@clause(
    "ddp.accumulation.unused-in-last",
    source="contract: since-zero-grad, used-early; "
    "pytorch issues 69031 and 42793, pull request 124193",
)
def test_a_parameter_used_only_in_an_early_micro_batch_is_reduced(world, subject):
    """A parameter used only before the last micro-batch MUST be reduced, or be an error.

    A reduction that only hooks trigger never happens for it, and a local gradient is stepped.
    """
    # The next forward is the latest moment for an error.
    calls = "accumulate 0 use=abc, backward 1 use=ab, note, zero_grad, backward 2 use=abc"
    ordinary = "accumulate 0, accumulate 1"
    mean_gradients(world, subject, "branches", calls, may_refuse=True, ordinary=ordinary)


@clause("ddp.accumulation.two-finishes", needs=(), source="contract: since-zero-grad, two-finishes")
def test_two_synchronised_micro_batches_add_up(world, subject):
    """Two synchronised micro-batches MUST add up to the mean of both, or be an error.

    A finish that divides every `.grad` divides those a second time that this backward left alone.
    """
    mean_gradients(
        world,
        subject,
        "branches",
        # The next forward is the latest moment for an error.
        "backward 0 use=abc, backward 1 use=ab, note, forward 2",
        may_refuse=True,
        within=rounding(torch.float32, terms=24 * world.size, depth=2),
    )


@clause(
    "ddp.accumulation.one-finish",
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; gradient accumulation",
)
@pytest.mark.parametrize("bucket_size_mb", [SMALL, 4 / 2**20], ids=["of-several", "of-one-tensor"])
def test_two_backwards_and_one_finish_add_up(world, subject, bucket_size_mb):
    """Two backwards and one finish MUST give the mean of both micro-batches, or be an error.

    An all-reduce of `.grad` in each backward adds up the first micro-batch once more. A flat bucket
    of one tensor is a view of its gradient.
    """
    size, ranks = world.size, range(world.size)

    def weighed(of_first: float, of_second: float) -> oracle.Gradients:
        first, second = (
            equivalence.full_batch_gradients("mlp", SEED, ranks=ranks, micros=[micro])
            for micro in (0, 1)
        )
        scaled = equivalence.scaled
        return equivalence.added(scaled(first, of_first), scaled(second, of_second))

    mean_gradients(
        world,
        subject,
        "mlp",
        # The next forward is the latest moment for an error.
        "unfinished 0, unfinished 1, finish, note, forward 2",
        bucket_size_mb=bucket_size_mb,
        may_refuse=True,
        within=rounding(torch.float32, terms=24 * size, depth=2),
        hints=[
            Hint(f"the first micro-batch counts {size} times: reduced twice", weighed(size, 1)),
            Hint(f"both count {size} times: their sum was reduced twice", weighed(size, size)),
            Hint(f"the last micro-batch counts 1/{size}: divided twice", weighed(1, 1 / size)),
            Hint("the first micro-batch is lost", weighed(0, 1)),
            Hint("the last micro-batch is lost", weighed(1, 0)),
        ],
    )


@clause(
    "ddp.accumulation.backward-twice",
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; two losses of one forward",
)
@pytest.mark.parametrize("bucket_size_mb", [SMALL, 4 / 2**20], ids=["of-several", "of-one-tensor"])
def test_two_backwards_of_one_forward_add_up(world, subject, bucket_size_mb):
    """Two backwards of one forward MUST give the mean of their sum, or be an error.

    What begins anew in each forward alone misses the second of them.
    """

    def of(ranks: range, factor: int) -> oracle.Gradients:
        found = equivalence.full_batch_gradients("mlp", SEED, ranks=ranks)
        return equivalence.scaled(found, factor)

    size = world.size
    once = of(range(size), 1)
    local = [of(range(rank, rank + 1), size) for rank in range(size)]
    mean_gradients(
        world,
        subject,
        "mlp",
        "twice 0, finish, note, forward 1",
        bucket_size_mb=bucket_size_mb,
        may_refuse=True,
        within=rounding(torch.float32, terms=24 * size, depth=2),
        hints=[
            Hint("one of the two backwards is lost", once),
            Hint("the first was reduced again", of(range(size), size + 1)),
            Hint("the sum of both was reduced twice", of(range(size), 2 * size)),
            Hint(
                "one was reduced, and one stayed local",
                [equivalence.added(once, own) for own in local],
            ),
        ],
    )


def counted(ctx, subject, toy, seed, flags):
    """Number of reductions in each micro-batch, after three ordinary steps."""
    replica = Replica(ctx, subject, toy, seed)
    for micro in range(3):
        replica.follow(f"zero_grad, backward {micro}")
    counts, usual = [], 0
    for micro, is_synchronised in enumerate((True, *flags)):
        with ctx.recording() as recorder:
            (replica.backward if is_synchronised else replica.accumulate)(micro)
        number = len(recorder.log().collectives(Kind.REDUCTION))
        if micro == 0:
            usual = number
        else:
            counts.append(number)
    return {"usual": usual, "counts": counts}


@clause(
    "ddp.accumulation.one-reduction-per-step",
    level="production",
    source="contract: one-copy, silent; "
    "accelerate issue 1726, sentence-transformers issue 4027, PiPPy issue 1133",
    worlds=(2,),
)
@given(flags=strategies.schedules())
@example(flags=(False, False, False, True))
def test_reductions_happen_exactly_where_they_were_asked_for(world, subject, flags):
    """A synchronised micro-batch MUST cost the usual reductions, any other one none."""
    ranks = world.run(counted, subject, "ragged", 7, flags)

    usual = ranks[0]["usual"]
    judge.holds(usual > 0, "expected at least one reduction in an ordinary step, got none")
    judge.equal(
        [rank["counts"] for rank in ranks],
        [usual if is_synchronised else 0 for is_synchronised in flags],
        quantity="number of reductions per micro-batch",
        given=f"synchronised {flags}",
    )
