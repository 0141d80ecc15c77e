"""Hypothesis over live ranks: bugs are found, shrunk and told apart; hangs are not shrunk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, Verbosity, given, settings
from hypothesis import strategies as st

from spec_tests.rig import strategies
from spec_tests.rig.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.rank import Context
from spec_tests.rig.world import World, Worlds

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


def failing_example(body: Callable[..., Any], world: World, **options: Any) -> tuple[Any, int]:
    """The smallest example at which the property fails, and how often it was executed."""
    seen: list[list[int]] = []

    @settings(QUICK, max_examples=60, phases=(Phase.generate, Phase.shrink), **options)
    @given(sizes=SIZES)
    def property_on_ranks(sizes: list[int]) -> None:
        seen.append(sizes)
        world.run(body, sizes, grace_s=0.5)

    with pytest.raises((RankRaised, RankHung, RankDied)):
        property_on_ranks()
    return seen[-1], len(seen)


def test_a_planted_bug_shrinks_to_its_smallest_example(worlds: Worlds):
    example, executions = failing_example(buckets, worlds.world(2))
    assert example == [1, 5]
    assert executions < 300


def test_the_exception_bears_the_smallest_example_and_the_remote_line(worlds: Worlds):
    world = worlds.world(2)

    @settings(QUICK, max_examples=60)
    @given(sizes=SIZES)
    def property_on_ranks(sizes: list[int]) -> None:
        world.run(buckets, sizes)

    message = r"rank 1 of 2 raised IndexError: bucket 1 of \[1, 5\]"
    with pytest.raises(RankRaised, match=message) as caught:
        property_on_ranks()
    assert any("sizes=[1, 5]" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].name == "buckets"


def two_bugs(ctx: Context, number: int) -> int:
    if number > 500:
        raise ValueError("large")
    if number % 2 == 1:
        raise ValueError("odd")
    return number


def test_two_planted_bugs_stay_two(worlds: Worlds):
    world = worlds.world(2)

    @settings(QUICK, max_examples=60, report_multiple_bugs=True)
    @given(number=st.integers(min_value=0, max_value=1000))
    def property_on_ranks(number: int) -> None:
        world.run(two_bugs, number)

    with pytest.raises(ExceptionGroup) as caught:
        property_on_ranks()
    messages = sorted(str(error).partition("\n")[0] for error in caught.value.exceptions)
    assert [message.rpartition(": ")[2] for message in messages] == ["large", "odd"]


def hang(ctx: Context, sizes: list[int]) -> None:
    if ctx.rank == 1 and len(sizes) > 1:
        return
    dist.barrier()


def exits(ctx: Context, sizes: list[int]) -> None:
    if ctx.rank == 1 and len(sizes) > 1:
        import os

        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(
    ("body", "kind"), [(hang, RankHung), (exits, RankDied)], ids=["hang", "exit"]
)
def test_a_hang_or_a_death_ends_the_property_and_is_not_shrunk(worlds: Worlds, body, kind):
    bad: list[list[int]] = []
    world = worlds.world(2)

    @settings(QUICK, max_examples=30)
    @given(sizes=SIZES)
    def property_on_ranks(sizes: list[int]) -> None:
        if len(sizes) > 1:
            bad.append(sizes)
        world.run(body, sizes, grace_s=0.5)

    with pytest.raises(kind):
        property_on_ranks()
    assert len(bad) == 1


def drawn(world: World) -> list[tuple[int, tuple[bool, ...], float]]:
    seen = []

    @settings(settings.get_profile("quick"))
    @given(
        seed=strategies.seeds,
        schedule=strategies.schedules(),
        size=strategies.bucket_sizes_mb(),
    )
    def property_on_ranks(seed: int, schedule: tuple[bool, ...], size: float) -> None:
        seen.append((seed, schedule, size))
        world.run(nothing, seed)

    property_on_ranks()
    return seen


def nothing(ctx: Context, seed: int) -> None:
    """Only called."""


def test_the_quick_profile_draws_the_same_each_time(worlds: Worlds):
    first = drawn(worlds.world(2))
    assert len(first) == settings.get_profile("quick").max_examples
    assert drawn(worlds.world(2)) == first
    assert len(set(first)) > 5


def test_schedules_end_with_a_synchronised_micro_batch(worlds: Worlds):
    for _, schedule, size in drawn(worlds.world(2)):
        assert schedule[-1]
        assert 1 <= len(schedule) <= 5
        assert size > 0


def test_the_profile_of_impostors_does_not_shrink():
    profile = settings.get_profile("impostors")
    assert Phase.shrink not in profile.phases
    assert profile.derandomize
    assert profile.verbosity == Verbosity.normal
    assert settings.get_profile("deep").max_examples > settings.get_profile("quick").max_examples
