"""Groups: the process group decides who talks and by how many one divides.

The world is often larger than the data-parallel group: pipeline and tensor parallelism have their
own axes. Code that divides by the size of the world, or takes rank 0 for the first rank of every
group, is right only as long as nobody else is there.
"""

from __future__ import annotations

from spec_tests.clause import MUST, clause
from spec_tests.ddp.replica import Replica
from spec_tests.laws import equivalence
from spec_tests.rig import judge, oracle
from spec_tests.rig.symptoms import Hint
from spec_tests.rig.toys import TOYS

DDP = ("ddp", "ddp_bucketed")
GROUPS = "DistributedDataParallel, process_group; verl issue 7493"
PAIRS = ((0, 1), (2, 3))


def in_groups(ctx, subject, groups, seed):
    """Weights after wrapping and gradients after a step, in a group of one's own."""
    replica = Replica(
        ctx, subject, "mlp", seed, weights_differ=True, process_group=ctx.split(groups)
    )
    weights = replica.weights()
    with ctx.recording() as recorder:
        replica.backward()
    return {"weights": weights, "gradients": replica.gradients(), "log": recorder.log()}


@clause(
    "ddp.group.starts-from-its-first-rank",
    MUST,
    level="correct",
    judges=DDP,
    source=GROUPS,
    worlds=(4,),
)
def test_each_group_starts_from_its_own_first_rank(world, subject):
    """In a sub-group every rank MUST start from the parameters of that group's first rank."""
    ranks = world.run(in_groups, subject, PAIRS, 7)

    own = [oracle.parameters("mlp", 7 + rank) for rank in range(4)]
    judge.tensors(
        [rank["weights"] for rank in ranks],
        [own[0], own[0], own[2], own[2]],
        quantity="parameter of the group's first rank",
        hints=[
            Hint("rank 0 of the world was taken, which is in another group", own[0]),
            Hint("the rank kept its own weights", own),
        ],
        given="groups (0, 1) and (2, 3)",
    )


@clause(
    "ddp.group.divides-by-its-size",
    MUST,
    level="correct",
    judges=DDP,
    source=GROUPS,
    worlds=(3, 4),
)
def test_each_group_divides_by_its_own_size(world, subject):
    """In a sub-group gradients MUST be the mean over that group alone, divided by its size."""
    groups = ((0, 1), (2,)) if world.size == 3 else PAIRS
    ranks = world.run(in_groups, subject, groups, 7)

    expected, whole = [], []
    for rank in range(world.size):
        group = next(group for group in groups if rank in group)
        # The toys' loss is multiplied by the size of the world, not of the group.
        total = _gradients(group, seed=7 + group[0])
        expected.append(equivalence.scaled(total, world.size / len(group)))
        whole.append(total)
    judge.tensors(
        [rank["gradients"] for rank in ranks],
        expected,
        quantity="mean gradient of its group",
        hints=[Hint("divided by the size of the world in place of the group", whole)],
        given=f"groups {groups}",
    )


def _gradients(group, *, seed):
    batches = [TOYS["mlp"].batch(7, rank=rank) for rank in group]
    return oracle.gradients("mlp", seed, batches)
