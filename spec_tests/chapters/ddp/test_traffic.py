"""Traffic: one copy of the gradients per step, in buckets that are what they claim to be.

The payload of data parallelism is fixed: every trainable element once per optimizer step. More is
waste that no loss curve shows. Level `production`: counts and packing are PyTorch's offer, not the
exercises' demand. See Li et al. 2020, sections 3.2.2 and 4.2.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_tests.programs.alone import SEED
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import agreement, traffic
from spec_tests.programs.ways import Replicas
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle
from spec_tests.rig.ranks.recorder import Kind
from spec_tests.rig.toys import TOYS

clause = clauses(judges=("ddp", "ddp_bucketed"), level="production", worlds=(2, 3))
holds = rows(clause, same_as_alone)
BUCKETED = ("ddp_bucketed",)
BUCKETS = "Li et al. 2020, section 3.2.2; torch reducer, compute_bucket_assignment_by_size"


def third_step(ctx, subject, scene, bucket_size_mb):
    """What the third step sends. The first two may still be settling."""
    replica = Replicas(ctx, subject, scene, bucket_size_mb=bucket_size_mb)
    for micro in "012":
        replica.zero_grad("none")
        with ctx.recording() as recorder:
            replica.backward(micro)
    return recorder.log()


@clause("ddp.traffic.one-copy-per-step", source="contract: one-copy; " + BUCKETS)
@pytest.mark.parametrize("toy", ["ragged", "tied", "mixed"])
def test_a_step_reduces_every_trainable_element_once(world, subject, toy):
    """A step MUST reduce every trainable element exactly once: no bucket lost, none sent twice."""
    trained = [p for p in TOYS[toy].build(SEED).parameters() if p.requires_grad]
    traffic.reduced_once(
        world.run(third_step, subject, toy, 0.00025),
        numel=sum(p.numel() for p in trained),
        num_bytes=sum(p.nbytes for p in trained),
        bookkeeping=_flags(toy),
        by_hand=True,
        given=f"toy {toy!r}, third step",
    )


@clause(
    "ddp.traffic.bucket-count",
    judges=BUCKETED,
    source="contract: bucket-size; " + BUCKETS,
    worlds=(2,),
)
@pytest.mark.parametrize("extreme", ["all-in-one", "one-each"])
def test_the_bucket_size_decides_how_many_reductions_there_are(world, subject, extreme):
    """A bucket that holds all MUST be one reduction; one that holds nothing, one per parameter.

    A size taken in elements, or a MiB taken for a megabit, moves both ends.
    """
    bucket_size_mb = 25.0 if extreme == "all-in-one" else 1e-6
    logs = world.run(third_step, subject, "ragged", bucket_size_mb)

    expected = 1 if extreme == "all-in-one" else len(oracle.parameters("ragged", SEED))
    judge.equal(
        [len(log.collectives(Kind.REDUCTION)) for log in logs],
        expected,
        quantity="number of reductions",
        given=f"toy 'ragged', bucket size {bucket_size_mb} MiB",
    )


@clause(
    "ddp.traffic.bucket-capacity",
    judges=BUCKETED,
    source="contract: bucket-size; " + BUCKETS,
    worlds=(2,),
)
@given(elements=st.sampled_from([8, 16, 24, 48]))
def test_a_bucket_closes_near_its_size(world, subject, elements):
    """A bucket MUST NOT exceed its size by more than the one parameter that filled it."""
    logs = world.run(third_step, subject, "ragged", elements * 4 / 2**20)

    sizes = [p.numel() for p in oracle.parameters("ragged", SEED).values()]
    for rank, log in enumerate(logs):
        largest = max(e.numel for e in log.collectives(Kind.REDUCTION))
        judge.holds(
            largest < elements + max(sizes) + _flags("ragged"),
            f"rank {rank}: expected buckets of about {elements} elements (largest parameter "
            f"{max(sizes)}), got one of {largest}",
            likely="the size is taken in another unit, or the bucket never closes",
        )


test_buckets_size_invariance = holds(
    "ddp.buckets.size-invariance",
    "Whatever the bucket size, gradients MUST be the same mean: packing is not arithmetic.",
    {
        f"{bucket}-{toy}": f"{toy} {bucket}: backward 0, zero_grad none, backward 1"
        for bucket in ("small", "tiny", "one")
        for toy in ("mlp", "ragged", "tied", "mixed")
    },
    level="correct",
    judges=BUCKETED,
    source="contract: mean-gradient; pytorch issue 30509",
)


@clause(
    "ddp.traffic.same-order-on-all-ranks",
    source="contract: same-order; pytorch issues 72843 and 174862",
)
def test_all_ranks_issue_the_same_collectives(world, subject):
    """All ranks MUST issue the same sequence of collectives, whatever becomes ready first."""
    agreement.same_collectives(
        world.run(third_step, subject, "branches-in-any-order", 0.0001),
        given="branches evaluated in another order on each rank",
    )


def _flags(toy: str) -> int:
    """Elements that may be sent in addition, for example a flag per unused parameter."""
    return len(oracle.parameters(toy, SEED)) + 8
