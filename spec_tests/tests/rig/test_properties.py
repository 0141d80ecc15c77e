"""Hypothesis over live ranks: bugs are found and shrunk; hangs are not shrunk."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds

QUICK = settings(settings.get_profile("default"), deadline=None, derandomize=True, database=None)
SIZES = st.lists(st.integers(min_value=1, max_value=9), max_size=4)


def buckets(ctx: Context, sizes: list[int]) -> list[float]:
    """Sums of buckets, all reduced; with a bug in rank 1 where a bucket of 5 is not the first."""
    sums = []
    for number, size in enumerate(sizes):
        flat = torch.ones(size)
        dist.all_reduce(flat)
        if ctx.rank == 1 and size >= 5 and number > 0:
            raise IndexError(f"bucket {number} of {sizes}")
        sums.append(float(flat.sum()))
    return sums


def run_property(body: Callable[..., Any], world: World, seen: list[Any], **more: Any) -> None:
    """Run a body on the ranks for drawn examples; `seen` collects them in order."""

    @settings(QUICK, max_examples=60, phases=(Phase.generate, Phase.shrink))
    @given(example=SIZES)
    def property_on_ranks(example: Any) -> None:
        seen.append(example)
        world.run(body, example, grace_s=0.5, **more)

    property_on_ranks()


def test_a_planted_bug_shrinks_to_its_smallest_example_and_remote_line(worlds: Worlds):
    seen: list[list[int]] = []
    message = r"rank 1 of 2 raised IndexError: bucket 1 of \[1, 5\]"
    with pytest.raises(RankRaised, match=message) as caught:
        run_property(buckets, worlds.world(2), seen)
    assert seen[-1] == [1, 5]
    assert len(seen) < 300
    assert any("example=[1, 5]" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].name == "buckets"


def leave(ctx: Context, sizes: list[int], is_death: bool) -> None:
    if ctx.rank == 1 and len(sizes) > 1:
        if is_death:
            os._exit(7)
        return
    dist.barrier()


@pytest.mark.parametrize(("is_death", "kind"), [(False, RankHung), (True, RankDied)])
def test_a_hang_or_a_death_ends_the_property_and_is_not_shrunk(worlds: Worlds, is_death, kind):
    seen: list[list[int]] = []
    with pytest.raises(kind):
        run_property(leave, worlds.world(2), seen, is_death=is_death)
    assert [len(sizes) > 1 for sizes in seen].count(True) == 1
