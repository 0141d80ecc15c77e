"""Accumulation: several micro-batches, one reduction.

Inside `no_sync` a rank works alone; the first backward outside reduces everything that has
gathered since `zero_grad`. Faults here are the quietest of all. A reduction on every micro-batch
costs N times the traffic and no digit; a micro-batch that stays local lets the replicas drift apart
by a little each step. See `DistributedDataParallel.no_sync` and Li et al. 2020, section 3.2.4.

The famous trap: PyTorch's wrapper decides in the *forward*. A trainer that puts only the backward
inside the context reduces every micro-batch; one that puts only the forward inside reduces none
and drifts. The contract therefore wants both inside, and the clauses place them so.
"""

from __future__ import annotations

from hypothesis import example, given

from spec_tests.chapters.ddp.replica import DDP
from spec_tests.programs.law import same_as_alone, situations
from spec_tests.rig import strategies
from spec_tests.rig.clause import clauses

clause = clauses(judges=DDP, needs=("no_sync",), level="correct", worlds=(2, 3))
NO_SYNC = "DistributedDataParallel.no_sync; Li et al. 2020, section 3.2.4"


TRAINED = "backward 0, zero_grad none, backward 1, zero_grad none, backward 2, zero_grad none, "


@clause("ddp.no-sync.sends-nothing", source="contract: silent; " + NO_SYNC)
@situations(
    {
        f"{steps}-{toy}": f"{scene}: {TRAINED if steps else ''}accumulate 8, accumulate 9"
        for steps in (0, 3)
        for toy, scene in {"mlp": "mlp", "buffers": "mlp counting"}.items()
    }
)
def test_nothing_is_sent_inside_no_sync(world, subject, situation):
    """Forward and backward inside `no_sync` MUST send nothing, buffers included.

    The numbers are right either way: only a look at the traffic tells.
    """
    same_as_alone(world, subject, situation, looks=("silent",), values=False)


@clause("ddp.no-sync.keeps-local-sums", source="contract: local-sums; " + NO_SYNC)
@situations({toy: f"{toy}: accumulate 0, accumulate 1, local" for toy in ("ragged", "tied")})
def test_gradients_inside_no_sync_are_plain_local_sums(world, subject, situation):
    """Inside `no_sync` `.grad` MUST hold the plain sum of this rank's gradients, not yet divided.

    Dividing what has accumulated on each micro-batch weighs the early ones less and less.
    """
    same_as_alone(world, subject, situation)


@clause(
    "ddp.no-sync.original-alone",
    level="production",
    source="contract: original-alone, original-local; "
    "DistributedDataParallel, prepare_for_backward: its forward arms the reducer",
)
def test_a_backward_of_the_original_alone_stays_local(world, subject):
    """Backwards of the original module alone MUST send nothing and leave local sums."""
    same_as_alone(
        world,
        subject,
        "mlp: backward 0, directly 1, backward 2, directly 3, backward 4",
        looks=("sent",),
    )


@clause(
    "ddp.accumulation.equals-big-batch",
    source="contract: since-zero-grad; " + NO_SYNC,
    worlds=(2, 3, 4),
)
@situations(
    {
        "2": "ragged: accumulate 0, backward 1",
        "4": "ragged: accumulate 0, accumulate 1, accumulate 2, backward 3",
        # A count of the first window's hooks is never reached: pytorch pull 187732.
        "1-after-a-window-of-3": "ragged: accumulate 5, accumulate 6, backward 7, zero_grad none, "
        "backward 0",
    }
)
def test_accumulated_micro_batches_equal_one_big_batch(world, subject, situation):
    """N micro-batches, the last synchronised, MUST give the mean gradient of them all."""
    same_as_alone(world, subject, situation)


def scheduled(flags):
    """Return the calls of a window: a flag says whether a micro-batch is synchronised."""
    words = ("backward" if is_synchronised else "accumulate" for is_synchronised in flags)
    return ", ".join(f"{word} {micro}" for micro, word in enumerate(words))


@clause(
    "ddp.no-sync.restores-after-exception",
    source=f"contract: restores; {NO_SYNC}; a context manager without try/finally, as in picotron",
    worlds=(3,),
)
def test_an_exception_inside_no_sync_does_not_leave_it_on(world, subject):
    """After the body of `no_sync` has raised, the next backward MUST be reduced.

    Otherwise one caught out-of-memory error lets the replicas drift apart for ever.
    """
    same_as_alone(world, subject, "mlp: leave, backward 0")


@clause(
    "ddp.no-sync.nests",
    source=f"contract: nests, restores; {NO_SYNC}; picotron restores a constant",
    worlds=(3,),
)
def test_an_inner_window_does_not_end_the_outer_one(world, subject):
    """Leaving a nested `no_sync` MUST restore the outer one, which still sends nothing.

    So MUST an exception that is raised in the inner one and caught in the outer one.
    """
    line = "mlp: nested 0 1, nested 3 4, backward 2"
    same_as_alone(world, subject, line, looks=("silent",), values=False)


@clause(
    "ddp.accumulation.zero-grad-discards",
    source="contract: since-zero-grad; LongCat-Image issue 46",
    worlds=(3,),
)
@situations(
    {
        f"to-{how}": f"mlp: backward 5, zero_grad {how}, accumulate 0, zero_grad {how}, backward 1"
        for how in ("none", "zero")
    }
)
def test_zero_grad_inside_a_window_discards_what_was_pending(world, subject, situation):
    """`zero_grad` after a window MUST discard pending gradients: no hidden accumulator."""
    same_as_alone(world, subject, situation)


@clause(
    "ddp.accumulation.evaluation-in-between", source="contract: evaluation; " + NO_SYNC, worlds=(2,)
)
def test_an_evaluation_forward_disturbs_nothing(world, subject):
    """A forward without gradients, inside or outside a window, MUST change no gradient."""
    program = (
        "accumulate 0, aside 7, evaluate 7, forward 1, evaluate 7, pending, evaluate 7, finish"
    )
    same_as_alone(world, subject, f"mlp: {program}")


@clause(
    "ddp.accumulation.unused-in-last",
    source="contract: since-zero-grad, used-early; "
    "pytorch issues 69031 and 42793, pull request 124193",
)
def test_a_parameter_used_only_in_an_early_micro_batch_is_reduced(world, subject):
    """A parameter used only before the last micro-batch MUST be reduced, or be an error.

    A reduction that only hooks trigger never happens for it, and a local gradient is stepped.
    """
    same_as_alone(
        world, subject, "branches-in-turn: accumulate 0, backward 1, zero_grad none, backward 2"
    )


@clause("ddp.accumulation.two-finishes", needs=(), source="contract: since-zero-grad, two-finishes")
def test_two_synchronised_micro_batches_add_up(world, subject):
    """Two synchronised micro-batches MUST add up to the mean of both, or be an error.

    A finish that divides every `.grad` divides those a second time that this backward left alone.
    """
    same_as_alone(world, subject, "branches-in-turn: backward 0, backward 1, forward 2")


BUCKETS = {"of-several": "small", "of-one-tensor": "tiny"}


@clause(
    "ddp.accumulation.one-finish",
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; gradient accumulation",
)
@situations({case: f"mlp {bucket}: several 0 1, forward 2" for case, bucket in BUCKETS.items()})
def test_two_backwards_and_one_finish_add_up(world, subject, situation):
    """Two backwards and one finish MUST give the mean of both micro-batches, or be an error.

    An all-reduce of `.grad` in each backward adds up the first micro-batch once more. A flat bucket
    of one tensor is a view of its gradient.
    """
    same_as_alone(world, subject, situation)


@clause(
    "ddp.accumulation.backward-twice",
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; two losses of one forward",
)
@situations({case: f"mlp {bucket}: twice 0, forward 1" for case, bucket in BUCKETS.items()})
def test_two_backwards_of_one_forward_add_up(world, subject, situation):
    """Two backwards of one forward MUST give the mean of their sum, or be an error.

    What begins anew in each forward alone misses the second of them.
    """
    same_as_alone(world, subject, situation)


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
    situation = f"ragged: {TRAINED}{scheduled(flags)}"
    same_as_alone(world, subject, situation, looks=("sent",), values=False)
