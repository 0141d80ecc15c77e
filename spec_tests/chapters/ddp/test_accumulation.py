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

from spec_tests.programs.law import same_as_alone
from spec_tests.programs.scene import REPLICAS
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=REPLICAS, needs=("no_sync",), level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)
NO_SYNC = "DistributedDataParallel.no_sync; Li et al. 2020, section 3.2.4"

TRAINED = "backward 0, zero_grad none, backward 1, zero_grad none, backward 2, zero_grad none, "

test_no_sync_sends_nothing = holds(
    "ddp.no-sync.sends-nothing",
    "Forward and backward inside `no_sync` MUST send nothing, buffers included.",
    # The numbers are right either way: only a look at the traffic tells.
    {
        f"{steps}-{toy}": f"{scene}: {TRAINED if steps else ''}accumulate 8, accumulate 9"
        for steps in (0, 3)
        for toy, scene in {"mlp": "mlp", "buffers": "mlp counting"}.items()
    },
    looks=("silent",),
    values=False,
    source="contract: silent; " + NO_SYNC,
)

test_no_sync_keeps_local_sums = holds(
    "ddp.no-sync.keeps-local-sums",
    "Inside `no_sync` `.grad` MUST hold the plain sum of this rank's gradients, not yet divided.",
    # Dividing what has accumulated on each micro-batch weighs the early ones less and less.
    {toy: f"{toy}: accumulate 0, accumulate 1, local" for toy in ("ragged", "tied")},
    source="contract: local-sums; " + NO_SYNC,
)

test_no_sync_original_alone = holds(
    "ddp.no-sync.original-alone",
    "Backwards of the original module alone MUST send nothing and leave local sums.",
    "mlp: backward 0, directly 1, backward 2, directly 3, backward 4",
    looks=("sent",),
    level="production",
    source="contract: original-alone, original-local; "
    "DistributedDataParallel, prepare_for_backward: its forward arms the reducer",
)

test_equals_big_batch = holds(
    "ddp.accumulation.equals-big-batch",
    "N micro-batches, the last synchronised, MUST give the mean gradient of them all.",
    {
        "2": "ragged: accumulate 0, backward 1",
        "4": "ragged: accumulate 0, accumulate 1, accumulate 2, backward 3",
        # A count of the first window's hooks is never reached: pytorch pull 187732.
        "1-after-a-window-of-3": "ragged: accumulate 5, accumulate 6, backward 7, zero_grad none, "
        "backward 0",
    },
    source="contract: since-zero-grad; " + NO_SYNC,
    worlds=(2, 3, 4),
)

test_no_sync_restores_after_exception = holds(
    "ddp.no-sync.restores-after-exception",
    "After the body of `no_sync` has raised, the next backward MUST be reduced.",
    # Otherwise one caught out-of-memory error lets the replicas drift apart for ever.
    "mlp: leave, backward 0",
    source=f"contract: restores; {NO_SYNC}; a context manager without try/finally, as in picotron",
    worlds=(3,),
)

test_no_sync_nests = holds(
    "ddp.no-sync.nests",
    "Leaving a nested `no_sync` MUST restore the outer one, which still sends nothing.",
    # So MUST an exception that is raised in the inner one and caught in the outer one.
    "mlp: nested 0 1, nested 3 4, backward 2",
    looks=("silent",),
    values=False,
    source=f"contract: nests, restores; {NO_SYNC}; picotron restores a constant",
    worlds=(3,),
)

test_zero_grad_discards = holds(
    "ddp.accumulation.zero-grad-discards",
    "`zero_grad` after a window MUST discard pending gradients: no hidden accumulator.",
    {
        f"to-{how}": f"mlp: backward 5, zero_grad {how}, accumulate 0, zero_grad {how}, backward 1"
        for how in ("none", "zero")
    },
    source="contract: since-zero-grad; LongCat-Image issue 46",
    worlds=(3,),
)

test_evaluation_in_between = holds(
    "ddp.accumulation.evaluation-in-between",
    "A forward without gradients, inside or outside a window, MUST change no gradient.",
    # Nor the window: what follows inside is still local.
    "mlp: accumulate 0, aside 7, evaluate 7, forward 1, evaluate 7, pending, evaluate 7, finish",
    looks=("silent",),
    source="contract: evaluation, silent; " + NO_SYNC,
    worlds=(2,),
)

test_unused_in_last = holds(
    "ddp.accumulation.unused-in-last",
    "A parameter used only before the last micro-batch MUST be reduced, or be an error.",
    # A reduction that only hooks trigger never happens for it, and a local gradient is stepped.
    "branches-in-turn: accumulate 0, backward 1, zero_grad none, backward 2",
    source="contract: since-zero-grad, used-early; "
    "pytorch issues 69031 and 42793, pull request 124193",
)

test_two_finishes = holds(
    "ddp.accumulation.two-finishes",
    "Two synchronised micro-batches MUST add up to the mean of both, or be an error.",
    # A finish that divides every `.grad` divides those a second time that this backward left alone.
    "branches-in-turn: backward 0, backward 1, forward 2",
    needs=(),
    source="contract: since-zero-grad, two-finishes",
)

BUCKETS = {"of-several": "small", "of-one-tensor": "tiny"}

test_one_finish = holds(
    "ddp.accumulation.one-finish",
    "Two backwards and one finish MUST give the mean of both micro-batches, or be an error.",
    # An all-reduce of `.grad` in each backward adds up the first micro-batch once more. A flat
    # bucket of one tensor is a view of its gradient.
    {case: f"mlp {bucket}: several 0 1, forward 2" for case, bucket in BUCKETS.items()},
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; gradient accumulation",
)

test_backward_twice = holds(
    "ddp.accumulation.backward-twice",
    "Two backwards of one forward MUST give the mean of their sum, or be an error.",
    # What begins anew in each forward alone misses the second of them.
    {case: f"mlp {bucket}: twice 0, forward 1" for case, bucket in BUCKETS.items()},
    needs=(),
    source="contract: finish_gradient_synchronization/several-backwards; two losses of one forward",
)
