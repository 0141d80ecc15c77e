"""The simulated world: what it proves and refuses, how ranks are kept apart, what it computes.

With DTensors: redistribution computes what one process does, along both axes of a mesh too.
"""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from spec_tests import impls
from spec_tests.chapters.ddp.test_programs import THREE_STEPS
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig import strategies
from spec_tests.rig.judge import evidence
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.sim import Deadlock, Schedule
from spec_tests.tests.rig import bodies, programs


def sim(worlds: Worlds, size: int = 2) -> World:
    return worlds.world(size, transport="sim")


def in_order(ctx: Context, late: tuple[int, ...]) -> list[int]:
    """Who passed this line before me, and I; the late ones first ask for a world of time."""
    if ctx.rank in late:
        ctx.be_late(3600.0)
    trail = ctx.scratch / "trail"
    with trail.open("a") as file:
        file.write(f"{ctx.rank} ")
    passed = [int(rank) for rank in trail.read_text().split()]
    ctx.barrier()
    trail.unlink(missing_ok=True)
    return passed


@pytest.mark.parametrize("policy", ["lowest", "reversed", "seeded"])
def test_who_is_late_lets_the_others_get_ahead_and_takes_no_time(worlds: Worlds, policy: str):
    world = sim(worlds, 3).scheduled(Schedule(policy))
    assert set(world.run(in_order, (0,))[0][:2]) == {1, 2}
    assert world.run(in_order, (1, 2))[0] == [0]
    assert max(map(len, world.run(in_order, (0, 1, 2)))) == 3


# ---------------------------------------------------------------------------- what it proves


def test_a_deadlock_is_told_with_who_waits_where(worlds: Worlds):
    begun = time.perf_counter()
    with pytest.raises(Deadlock) as caught:
        sim(worlds).run(bodies.fail, "leave", 1)
    assert time.perf_counter() - begun < 5.0  # a grace period would have been two seconds or more
    text = str(caught.value)
    assert "rank 0: waits for all_reduce (sizes (4,), dtypes ('float32',)" in text
    assert "not come: rank 1" in text
    assert "rank 1: has left the body" in text
    assert "dist.all_reduce(tensor)" in caught.value.ranks[0].stack
    assert [len(rank.collectives) for rank in caught.value.ranks] == [2, 1]
    last = caught.value.ranks[0].collectives[-1]
    assert last.startswith("all_reduce (sizes (4,), dtypes ('float32',), reduce operator SUM) #")


def cross(ctx: Context) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if ctx.rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def test_two_groups_in_opposite_order_are_a_deadlock(worlds: Worlds):
    with pytest.raises(Deadlock, match=r"rank 0: waits for .* group 1 .*\n  rank 1: .* group 2 "):
        sim(worlds).run(cross)


def unlike(ctx: Context, what: str) -> None:
    tensor = torch.ones(4, dtype=torch.float64)
    if what == "operation" and ctx.rank == 1:
        dist.broadcast(tensor, 0)
    elif what == "sizes" and ctx.rank == 1:
        dist.all_reduce(tensor[:3])
    elif what == "dtypes" and ctx.rank == 1:
        dist.all_reduce(tensor.float())
    elif what == "reduce operator" and ctx.rank == 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    elif what == "root":
        dist.broadcast(tensor, ctx.rank)
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
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(torch.zeros(8), tensor, async_op=True)
    else:
        work = dist.all_reduce(tensor, async_op=True)
    if how == "forget":
        return tensor
    if how in ("write", "change"):
        tensor.fill_(5.0)
    if how == "again":
        dist.all_reduce(tensor[2:])
    early = tensor.clone() if how == "read" else tensor
    work.wait()
    return early


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("forget", "UnwaitedWork", ""),
        ("write", "BufferInFlight", ""),
        ("change", "BufferInFlight", "rank 0 changed what it sends"),
        ("again", "BufferInFlight", ""),
    ],
)
def test_a_handle_that_is_misused_is_an_error_with_its_place(worlds: Worlds, how, kind, said: str):
    with pytest.raises(RankRaised, match=r"test_sim\.py:\d+") as caught:
        sim(worlds).run(misuse, how)
    assert caught.value.error.kind == kind
    assert said in str(caught.value)


def test_who_reads_before_the_wait_reads_poison(worlds: Worlds):
    assert all(seen.isnan().all() for seen in sim(worlds).run(misuse, "read"))
    assert all(torch.equal(seen, torch.full((4,), 3.0)) for seen in sim(worlds).run(misuse, ""))
    lenient = sim(worlds).scheduled(Schedule(unwaited="ignore"))
    assert all(seen.isnan().all() for seen in lenient.run(misuse, "forget"))


# ------------------------------------------------------------------- ranks of their own


def private(ctx: Context) -> tuple[object, ...]:
    os.environ["MINE"] = str(ctx.rank)
    torch.set_default_dtype(torch.float64 if ctx.rank else torch.float32)
    seen = []
    for _ in range(3):
        ctx.barrier()
        seen.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    return os.environ["MINE"], os.environ["RANK"], torch.get_default_dtype(), seen


@pytest.mark.parametrize("policy", ["lowest", "reversed", "seeded"])
def test_numbers_and_environment_belong_to_a_rank(worlds: Worlds, policy: str):
    ranks = sim(worlds).scheduled(Schedule(policy, seed=5)).run(private, seed=3)
    live = worlds.world(2).run(private, seed=3)
    # As on live ranks; a dtype of float64 draws other numbers, so the comparison is by rank.
    assert ranks == live
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


@pytest.mark.parametrize(
    ("body", "said"),
    [(on_a_thread, "is not a rank"), (gloo_by_hand, "ProcessGroupGloo was made directly")],
)
def test_what_cannot_be_simulated_is_refused_in_plain_words(worlds: Worlds, body, said: str):
    for told in sim(worlds).run(body):
        assert said in told
        assert "--transport gloo" in told


def block(ctx: Context) -> None:
    if ctx.rank == 1:
        threading.Event().wait()
    ctx.barrier()


def test_who_blocks_outside_of_a_collective_is_named_in_time(worlds: Worlds):
    with pytest.raises(RankHung, match="rank 1 is blocked outside of a collective") as caught:
        sim(worlds).run(block, grace_s=0.5)
    assert not isinstance(caught.value, Deadlock)
    assert "threading.Event().wait()" in caught.value.ranks[1].stack
    assert sim(worlds).run(bodies.who) == [(0, 2, ""), (1, 2, "")]


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raise", RankRaised, "rank 1 of 2 raised KeyError"),
        ("exit", RankRaised, "rank 1 of 2 raised SystemExit: 3"),
        ("os-exit", RankDied, "rank 1 of 2: exited with 3"),
        ("leave", Deadlock, "no rank can go on"),
        ("mismatch", RankRaised, "CollectiveMismatch"),
    ],
)
def test_what_must_fail_fails_and_the_next_call_is_well(worlds: Worlds, how: str, kind, said: str):
    with pytest.raises(kind, match=said):
        sim(worlds).run(bodies.fail, how, 1)
    assert sim(worlds).run(bodies.who) == [(0, 2, ""), (1, 2, "")]


def test_hypothesis_finds_the_schedule_that_a_bug_needs_and_shrinks_it(worlds: Worlds):
    # Rightly written without a pinned example: the clause has some.
    faulty = worlds.world(2, impls.parse("impostor:ddp.gathers-by-completion"), transport="sim")

    @settings(max_examples=100, phases=[Phase.generate, Phase.shrink])
    @given(schedule=strategies.schedules_of_ranks())
    def gradients_are_the_mean(schedule: Schedule) -> None:
        scheduled = faulty.scheduled(schedule)
        same_as_alone(scheduled, "ddp_bucketed", THREE_STEPS)

    with pytest.raises((RankRaised, AssertionError)) as caught:
        gradients_are_the_mean()
    (note,) = caught.value.__notes__
    assert "choices=(),\n        straggler=None,\n        late=1" in note


def test_a_schedule_is_refused_by_live_ranks(worlds: Worlds):
    with pytest.raises(ValueError, match="transport sim only"):
        worlds.world(2).scheduled(Schedule())


def test_what_the_world_says_is_no_refusal_of_the_implementation(worlds: Worlds):
    with pytest.raises(RankRaised, match="CollectiveMismatch"):
        refusal.answer_or_refusal(sim(worlds), unlike, "sizes")


# --------------------------------------------------------------------- what it computes, and gloo


@pytest.mark.parametrize("size", [2, 3])
def test_random_programs_agree_with_gloo(worlds: Worlds, size: int):
    # Thousands of them: pytest --profile deep
    many = 50 if settings().max_examples > settings.get_profile("quick").max_examples else 2
    for batch in programs.batches(0, many * programs.BATCH, size):
        sim, gloo = worlds.world(size, transport="sim"), worlds.world(size)
        assert programs.disagreements(batch, sim, gloo) == []


def test_the_pinned_programs_use_every_operation():
    drawn = [p for batch in programs.batches(0, 2 * programs.BATCH, 2) for p in batch]
    used = {statement.operation for program in drawn for statement in program.statements}
    assert used == programs.OPERATIONS.keys()
    assert {program.is_exact for program in drawn} == {True, False}


@pytest.mark.parametrize(
    "schedule",
    [Schedule("reversed"), Schedule("seeded", seed=1), Schedule(straggler=0)],
    ids=str,
)
def test_no_program_depends_on_the_schedule(worlds: Worlds, schedule: Schedule):
    sim = worlds.world(3, transport="sim")
    (batch,) = programs.batches(0, programs.BATCH, 3)
    first, second = sim.run(programs.run, batch), sim.scheduled(schedule).run(programs.run, batch)
    for rank in range(3):
        for program, a, b in zip(batch, first[rank], second[rank], strict=True):
            if program.is_exact:
                pairs = zip(chain(*a), chain(*b), strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), program


def redistributed(ctx: Context) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    plane = init_device_mesh("cpu", (ctx.world_size // 2, 2)) if ctx.world_size == 4 else mesh
    places = [Shard(dim) for dim in range(plane.ndim)]
    whole = torch.arange(30.0).reshape(6, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    partial = DTensor.from_local(torch.full((2,), float(ctx.rank + 1)), mesh, [Partial()])
    product: Any = rows @ distribute_tensor(whole.T, mesh, [Shard(1)])
    return {
        "gathered": rows.redistribute(placements=[Replicate()]).to_local(),
        "exchanged": rows.redistribute(placements=[Shard(1)]).full_tensor(),
        "reduced": partial.redistribute(placements=[Replicate()]).to_local(),
        "scattered": partial.redistribute(placements=[Shard(0)]).full_tensor(),
        "product": product.full_tensor(),
        "by both axes of a mesh": distribute_tensor(whole, plane, places).full_tensor(),
    }


@pytest.mark.parametrize("size", [2, 3, 4])  # 5 columns are dealt out unevenly to all
def test_dtensor_redistributes_as_one_process_computes(worlds: Worlds, size: int):
    whole = torch.arange(30.0).reshape(6, 5)
    total = torch.full((2,), float(sum(range(1, size + 1))))
    expected = dict.fromkeys(("gathered", "exchanged", "by both axes of a mesh"), whole)
    expected |= {"reduced": total, "scattered": total, "product": whole @ whole.T}
    for seen in worlds.world(size, transport="sim").run(redistributed):
        for name, wanted in expected.items():
            assert torch.equal(seen[name], wanted), name
