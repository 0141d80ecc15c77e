"""Groups: the process group decides who talks and by how many one divides.

The world is often larger than the data-parallel group: pipeline and tensor parallelism have their
own axes. Code that divides by the size of the world, or takes rank 0 for the first rank of every
group, is right only as long as nobody else is there.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.ddp.replica import Replica
from spec_tests.programs.laws import equivalence, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS

clause = clauses(judges=("ddp", "ddp_bucketed"), level="correct", worlds=(4,))
GROUPS = "DistributedDataParallel, process_group; verl issue 7493"
# Not neighbours: the first rank of a group is then no multiple of the group's size.
GROUPS_OF = {3: ((0, 2), (1,)), 4: ((0, 2), (1, 3))}


def state_in_groups(ctx, subject, toy, seed, groups):
    """Parameters and buffers after wrapping in a sub-group; the weights differ between ranks."""
    replica = Replica(ctx, subject, toy, seed, weights_differ=True, process_group=ctx.split(groups))
    buffers = {name: buffer.clone() for name, buffer in replica.module.named_buffers()}
    return {**replica.weights(), **buffers}


def gradients_in_groups(ctx, subject, toy, seed, groups, uses=None):
    """Gradients of one backward in a sub-group; all ranks start from equal weights."""
    replica = Replica(ctx, subject, toy, seed, process_group=ctx.split(groups))
    flags = {"use": uses[ctx.rank]} if uses else {}
    replica.backward(**flags)
    gradients = replica.gradients()
    replica.loss(1, **flags)  # the next forward: the latest moment for an error
    return gradients


@clause(
    "ddp.group.starts-from-its-first-rank", source="contract: own-group, first-weights; " + GROUPS
)
@pytest.mark.parametrize("toy", ["mlp", "buffers"])
def test_each_group_starts_from_its_own_first_rank(world, subject, toy):
    """In a sub-group every rank MUST start from the state of that group's first rank."""
    groups = GROUPS_OF[world.size]
    ranks = world.run(state_in_groups, subject, toy, 7, groups)

    own = [{**oracle.parameters(toy, 7 + r), **oracle.buffers(toy, 7 + r)} for r in range(4)]
    judge.tensors(
        ranks,
        [own[_group_of(rank, groups)[0]] for rank in range(world.size)],
        quantity="state of the group's first rank",
        hints=[
            Hint("rank 0 of the world was taken, which is in another group", own[0]),
            Hint("the rank kept its own", own),
        ],
        given=f"toy {toy!r}, groups {groups}",
    )


@clause("ddp.group.divides-by-its-size", source="contract: own-group; " + GROUPS, worlds=(3, 4))
def test_each_group_divides_by_its_own_size(world, subject):
    """In a sub-group gradients MUST be the mean over that group alone, divided by its size."""
    groups = GROUPS_OF[world.size]
    ranks = world.run(gradients_in_groups, subject, "mlp", 7, groups)

    expected, whole = [], []
    for rank in range(world.size):
        group = _group_of(rank, groups)
        # The toys' loss is multiplied by the size of the world, not of the group.
        total = _gradients(group)
        expected.append(equivalence.scaled(total, world.size / len(group)))
        whole.append(total)
    mean = {name: sum(_gradients(group)[name] for group in groups) for name in whole[0]}
    everyone = equivalence.scaled(mean, float(world.size))
    judge.tensors(
        ranks,
        expected,
        quantity="mean gradient of its group",
        hints=[
            Hint("divided by the size of the world in place of the group", whole),
            Hint("summed over every rank of the world: the group was left aside", everyone),
            Hint("the mean over every rank of the world: the group was left aside", mean),
        ],
        given=f"groups {groups}",
    )


@clause("ddp.group.keeps-to-itself", source="contract: own-group, unused-everywhere; " + GROUPS)
def test_what_another_group_uses_does_not_matter(world, subject):
    """A parameter that another group uses MUST keep None in a group that does not, or be an error.

    Flags of unused parameters, like everything else, belong to the group.
    """
    groups, uses = GROUPS_OF[4], ("ab", "abc", "ab", "abc")
    ranks = refusal.answer_or_refusal(
        world,
        gradients_in_groups,
        subject,
        "branches",
        7,
        groups,
        uses,
        ordinary=(gradients_in_groups, subject, "mlp", 7, groups),
    )

    if ranks is not None:
        sums = [_gradients(_group_of(r, groups), "branches", uses[r]) for r in range(4)]
        expected = [equivalence.scaled(each, 2.0) for each in sums]
        judge.tensors(
            ranks,
            expected,
            quantity="mean gradient of its group",
            hints=[Hint("divided by the size of the world in place of the group", sums)],
            given=f"groups {groups}, branches used {uses}",
        )


def _group_of(rank, groups):
    return next(group for group in groups if rank in group)


def _gradients(group, toy="mlp", use=None):
    """Of the summed loss of a group."""
    batches = [TOYS[toy].batch(7, rank=rank) for rank in group]
    flags = [{"use": use} if use else {}] * len(group)
    return oracle.gradients(toy, 7, batches, flags)
