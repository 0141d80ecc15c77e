"""Groups: the process group decides who talks and by how many one divides.

The world is often larger than the data-parallel group: pipeline and tensor parallelism have their
own axes. Code that divides by the size of the world, or takes rank 0 for the first rank of every
group, is right only as long as nobody else is there.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.ddp.test_construction import buffers
from spec_tests.programs.alone import SEED
from spec_tests.programs.law import same_as_alone
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(judges=("ddp", "ddp_bucketed"), level="correct", worlds=(4,))
GROUPS = "DistributedDataParallel, process_group; verl issue 7493"
IN_GROUPS = {3: "apart", 4: "every-second"}
# Not neighbours: the first rank of a group is then no multiple of the group's size.
EVERY_SECOND = ((0, 2), (1, 3))


@clause(
    "ddp.group.starts-from-its-first-rank", source="contract: own-group, first-weights; " + GROUPS
)
@pytest.mark.parametrize("toy", ["mlp", "buffers"])
def test_each_group_starts_from_its_own_first_rank(world, subject, toy):
    """In a sub-group every rank MUST start from the state of that group's first rank."""
    if toy == "mlp":
        same_as_alone(world, subject, "mlp every-second seed-by-rank: step")
        return
    ranks = world.run(buffers, subject, toy, EVERY_SECOND)

    own = [oracle.buffers(toy, SEED + rank) for rank in range(4)]
    judge.tensors(
        ranks,
        [own[rank % 2] for rank in range(4)],
        quantity="buffer of the group's first rank",
        hints=[
            Hint("rank 0 of the world was taken, which is in another group", own[0]),
            Hint("the rank kept its own", own),
        ],
        given=f"toy {toy!r}, groups {EVERY_SECOND}",
    )


@clause("ddp.group.divides-by-its-size", source="contract: own-group; " + GROUPS, worlds=(3, 4))
def test_each_group_divides_by_its_own_size(world, subject):
    """In a sub-group gradients MUST be the mean over that group alone, divided by its size."""
    same_as_alone(world, subject, f"mlp {IN_GROUPS[world.size]}: backward 0")


@clause("ddp.group.keeps-to-itself", source="contract: own-group, unused-everywhere; " + GROUPS)
def test_what_another_group_uses_does_not_matter(world, subject):
    """A parameter that another group uses MUST keep None in a group that does not, or be an error.

    Flags of unused parameters, like everything else, belong to the group.
    """
    # The next forward is the latest moment for an error.
    same_as_alone(world, subject, "branches-by-rank every-second: backward 1, forward 2")
