"""Hypothesis over live ranks: bugs are found and shrunk; hangs are not shrunk."""

import os

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds

QUICK = settings(settings.get_profile("default"), deadline=None, derandomize=True, database=None)
SIZES = st.lists(st.integers(min_value=1, max_value=9), max_size=4)


def fail(ctx: Context, sizes: list[int], how: str) -> None:
    """Rank 1 fails in the way called `how` where there is more than one size."""
    if how == "raise":
        dist.barrier()
    if ctx.rank == 1 and len(sizes) > 1:
        if how == "raise":
            raise IndexError(f"of {sizes}")
        if how == "exit":
            os._exit(7)
    elif how != "raise":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "kind"), [("raise", RankRaised), ("leave", RankHung), ("exit", RankDied)]
)
def test_an_error_is_shrunk_and_a_hang_or_a_death_ends_the_property(worlds: Worlds, how, kind):
    seen: list[list[int]] = []

    @settings(QUICK, max_examples=60, phases=(Phase.generate, Phase.shrink))
    @given(sizes=SIZES)
    def property_on_ranks(sizes: list[int]) -> None:
        seen.append(sizes)
        worlds.world(2).run(fail, sizes, how, grace_s=0.5)

    with pytest.raises(kind) as caught:
        property_on_ranks()
    if how == "raise":
        assert seen[-1] == [1, 1]
        assert any("sizes=[1, 1]" in note for note in caught.value.__notes__)
    else:
        assert [len(sizes) > 1 for sizes in seen].count(True) == 1
