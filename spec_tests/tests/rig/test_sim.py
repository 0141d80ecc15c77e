"""The simulated world: what it proves and refuses, how a schedule decides, what it computes."""

import os
import random
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from spec_tests.programs.laws import refusal
from spec_tests.rig.judge import evidence
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.sim import Deadlock, Schedule
from spec_tests.tests.rig import bodies, programs


def sim(worlds: Worlds, size: int = 2) -> World:
    return worlds.world(size, transport="sim")


# ---------------------------------------------------------------------------- what it proves


def test_a_deadlock_is_told_with_who_waits_where(worlds: Worlds):
    with pytest.raises(Deadlock) as caught:
        sim(worlds).run(bodies.fail, "leave", 1)
    text = str(caught.value)
    assert "rank 0: waits for all_reduce (sizes (4,), dtypes ('float32',)" in text
    assert "not come: rank 1" in text
    assert "rank 1: has left the body" in text
    assert "dist.all_reduce(tensor)" in caught.value.ranks[0].stack
    assert [len(rank.collectives) for rank in caught.value.ranks] == [2, 1]


def cross(ctx: Context) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if ctx.rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def test_two_groups_in_opposite_order_are_a_deadlock(worlds: Worlds):
    with pytest.raises(Deadlock, match=r"rank 0: waits for .* group 1 .*\n  rank 1: .* group 2 "):
        sim(worlds).run(cross)


POOL = torch.zeros(8)


def gather_into_a_pool(ctx: Context) -> None:
    dist.all_gather_into_tensor(POOL, torch.ones(4), async_op=True).wait()


def test_a_buffer_that_ranks_share_is_a_matter_of_live_ranks(worlds: Worlds):
    with pytest.raises(unittest.SkipTest, match=r"ranks 0 and 1 share .*test_sim\.py:"):
        sim(worlds).run(gather_into_a_pool)


def unlike(ctx: Context, what: str) -> None:
    tensor = torch.ones(4, dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "operation": lambda: dist.broadcast(tensor, 0),
        "sizes": lambda: dist.all_reduce(tensor[:3]),
        "dtypes": lambda: dist.all_reduce(tensor.float()),
        "reduce operator": lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX),
        "root": lambda: dist.broadcast(tensor, ctx.rank),
        "parts": lambda: programs.gather(tensor[:3], torch.ones(2 - ctx.rank).double()),
    }
    if what in ("root", "parts") or ctx.rank == 1:
        calls[what]()
    else:
        dist.all_reduce(tensor)


@pytest.mark.parametrize("what", ["operation", "sizes", "dtypes", "reduce operator", "root"])
def test_a_mismatch_names_both_ranks_and_what_differs(worlds: Worlds, what: str):
    with pytest.raises(RankRaised, match=f"rank 1 came with (an)?other {what}") as caught:
        sim(worlds).run(unlike, what)
    assert caught.value.error.kind == "CollectiveMismatch"
    assert "rank 0 posted first" in str(caught.value)
    lanes = evidence.of(caught.value)["lanes"]
    assert [len(lane["calls"]) for lane in lanes] == [1, 1], "a picture shows what each rank issued"


def misuse(ctx: Context, how: str) -> torch.Tensor:
    tensor = torch.full((4,), float(ctx.rank + 1))
    if how == "change":
        work = programs.gather(torch.zeros(8), tensor, async_op=True)
    elif how == "ahead":
        work = programs.gather(torch.zeros(8), tensor.clone(), async_op=True)
    else:
        work = dist.all_reduce(tensor, async_op=True)
    if how in ("forget", "ahead"):
        return tensor
    if how in ("write", "change"):
        tensor.fill_(5.0)
    if how == "again":
        dist.all_reduce(tensor[2:])
    if how == "ask":
        work.result()
    early = tensor.clone() if how == "read" else tensor
    work.wait()
    return early


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("forget", "UnwaitedWork"),
        ("ask", "SimError"),
        *((h, "BufferInFlight") for h in ("write", "change", "again")),
    ],
)
def test_a_handle_that_is_misused_is_an_error_with_its_place(worlds: Worlds, how: str, kind: str):
    with pytest.raises(RankRaised, match=r"test_sim\.py:\d+") as caught:
        sim(worlds).run(misuse, how)
    assert caught.value.error.kind == kind


def test_who_reads_before_the_wait_reads_poison(worlds: Worlds):
    assert all(seen.isnan().all() for seen in sim(worlds).run(misuse, "read"))
    assert all(torch.equal(seen, torch.full((4,), 3.0)) for seen in sim(worlds).run(misuse, ""))
    lenient = sim(worlds).scheduled(Schedule(unwaited="none"))
    assert all(seen.isnan().all() for seen in lenient.run(misuse, "forget"))


def test_what_is_gathered_ahead_may_be_left_unless_every_wait_is_asked_for(worlds: Worlds):
    left = sim(worlds).run(misuse, "ahead").in_flight
    assert [words.partition(" (")[0] for words in left] == [
        f"on rank {i}: all_gather_single" for i in (0, 1)
    ]
    with pytest.raises(RankRaised, match="UnwaitedWork: rank 0 has left the body"):
        sim(worlds).scheduled(Schedule(unwaited="all")).run(misuse, "ahead")


def private(ctx: Context) -> tuple[object, ...]:
    os.environ["MINE"] = str(ctx.rank)
    torch.set_default_dtype(torch.float64 if ctx.rank else torch.float32)
    ctx.barrier()
    drawn = (float(torch.rand(())), random.random(), float(np.random.rand()))
    c10d = dist.distributed_c10d
    groups = [*c10d._pg_group_ranks[c10d._get_default_group()].items()]
    return os.environ["MINE"], os.environ["RANK"], torch.get_default_dtype(), drawn, groups


def test_numbers_and_environment_belong_to_a_rank(worlds: Worlds):
    ranks = sim(worlds).scheduled(Schedule("seeded", seed=5)).run(private, seed=3)
    # As on live ranks; a dtype of float64 draws other numbers, so the comparison is by rank.
    assert ranks == worlds.world(2).run(private, seed=3)
    assert any("default dtype" in leak for leak in ranks.leaks)


def trace(ctx: Context, path: str) -> list[str]:
    for step in range(3):
        with (ctx.scratch / path).open("a") as file:
            file.write(f"{ctx.rank}{step} ")
        ctx.barrier()
    return (ctx.scratch / path).read_text().split()


def test_the_schedule_decides_and_repeats_itself(worlds: Worlds):
    def order(schedule: Schedule, path: str) -> list[str]:
        return sim(worlds, 3).scheduled(schedule).run(trace, path)[0]

    seeded = [order(Schedule("seeded", seed=seed), f"s{seed}") for seed in range(6)]
    assert seeded == [order(Schedule("seeded", seed=seed), f"t{seed}") for seed in range(6)]
    assert len({tuple(each) for each in seeded}) > 1
    assert order(Schedule(), "lowest")[:3] == ["00", "10", "20"]
    assert order(Schedule("reversed"), "reversed")[:3] == ["20", "10", "00"]
    assert order(Schedule("drawn", choices=(2, 0, 1)), "drawn")[:3] == ["20", "10", "00"]
    assert order(Schedule(straggler=0), "straggler")[:3] == ["10", "20", "00"]
    with pytest.raises(ValueError, match="a schedule is an input of transport sim only, not gloo"):
        worlds.world(3, transport="gloo").scheduled(Schedule())


# -------------------------------------------------------------------------- what it refuses


def on_a_thread(ctx: Context) -> str:
    with ThreadPoolExecutor(1) as other:
        return str(other.submit(dist.all_reduce, torch.ones(1)).exception())


def gloo_by_hand(ctx: Context) -> str:
    try:
        dist.ProcessGroupGloo(dist.HashStore(), ctx.rank, ctx.world_size, timedelta(seconds=9))
    except RuntimeError as error:
        return str(error)
    return ""


def fake_group(ctx: Context) -> str:
    try:
        dist.new_group(backend="fake")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (on_a_thread, "is not a rank"),
        (gloo_by_hand, "ProcessGroupGloo was made directly"),
        (fake_group, "a group of backend fake was made"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_plain_words(worlds: Worlds, body, said: str):
    for told in sim(worlds).run(body):
        assert said in told
        assert "--transport gloo" in told


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raise", RankRaised, "rank 1 of 2 raised KeyError"),
        ("exit", RankRaised, "rank 1 of 2 raised SystemExit: 3"),
        ("os-exit", RankDied, "rank 1 of 2: exited with 3"),
        ("hang", RankHung, "rank 1 blocked, nothing moved for .*, outside of a collective"),
        ("leave", Deadlock, "no rank can go on"),
        ("mismatch", RankRaised, "CollectiveMismatch"),
    ],
)
def test_what_must_fail_fails_and_the_next_call_is_well(worlds: Worlds, how: str, kind, said: str):
    with pytest.raises(kind, match=said) as caught:
        sim(worlds).run(bodies.fail, how, 1, grace_s=0.5)
    assert isinstance(caught.value, Deadlock) == (how == "leave")
    assert how != "hang" or "time.sleep(3600)" in caught.value.ranks[1].stack
    assert sim(worlds).run(bodies.who) == [(0, 2, ""), (1, 2, "")]


def call_with_two(ctx: Context) -> None:
    torch.nn.Identity()(1, 2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ((unlike, "sizes"), "CollectiveMismatch"),
        ((call_with_two,), "takes 2 positional arguments but 3 were given"),
    ],
)
def test_what_the_world_or_a_forward_says_is_no_refusal(worlds: Worlds, body, said: str):
    with pytest.raises(RankRaised, match=said):
        refusal.answer_or_refusal(sim(worlds), *body)


def test_sizes_that_do_not_fit_are_refused_by_each_rank_itself(worlds: Worlds):
    assert refusal.answer_or_refusal(sim(worlds), unlike, "parts") is None


# --------------------------------------------------------------------- what it computes, and gloo


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_agree_with_gloo_whatever_the_schedule(worlds: Worlds, size: int):
    # Thousands of them: pytest --profile deep
    many = 50 if settings().max_examples > settings.get_profile("quick").max_examples else 2
    used = set()
    for seed in range(many):
        batch = programs.draw(seed, size)
        lived = worlds.world(size).run(programs.run, batch)
        for schedule in (Schedule(), Schedule("reversed"), Schedule("seeded", seed=seed)):
            simulated = sim(worlds, size).scheduled(schedule).run(programs.run, batch)
            assert programs.disagreements(batch, simulated, lived) == []
        used |= {statement.operation for program in batch.programs for statement in program}
    assert used == programs.OPERATIONS.keys()
