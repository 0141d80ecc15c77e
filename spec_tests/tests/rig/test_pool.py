"""Live ranks when nothing goes wrong: what crosses the pipe, what lasts, what a pool costs."""

import gc
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spec_tests.rig.ranks.errors import RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig import bodies
from spec_tests.tests.rig.helpers import alive

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
)


# ------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("transport", "size"),
    [*(("gloo", size) for size in (1, 2, 3, 4)), *(("sim", size) for size in (1, 2, 3, 16))],
)
def test_ranks_know_who_they_are_and_collectives_add_up(worlds: Worlds, transport, size: int):
    world = worlds.world(size, transport=transport)
    assert world.run(bodies.who, word="hello") == [(rank, size, "hello") for rank in range(size)]
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) * sum(range(1, size + 1))
    for total in world.run(bodies.total, [1.0, 2.0]):
        assert torch.equal(total, expected)


@pytest.mark.parametrize(
    ("size", "transport", "said"),
    [
        (0, "gloo", "at least one rank, got size 0"),
        (-1, "sim", "at least one rank, got size -1"),
        (2, "telepathy", "unknown transport 'telepathy'; known: gloo, sim, cuda"),
    ],
)
def test_a_world_that_cannot_be_is_refused(worlds: Worlds, size: int, transport: str, said: str):
    with pytest.raises(ValueError, match=said):
        worlds.world(size, transport=transport)


# --------------------------------------------------------------------------------------- results


def echo(ctx: Context, value: object) -> object:
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_as_it_went(worlds: Worlds, dtype: torch.dtype):
    values = torch.arange(6.0).reshape(2, 3)
    sent = torch.complex(values, -values).to(dtype) if dtype.is_complex else values.to(dtype)
    for back in worlds.world(2).run(echo, sent):
        assert (back.dtype, back.shape) == (dtype, sent.shape)
        assert torch.equal(back.view(torch.uint8), sent.view(torch.uint8))


def awkward(ctx: Context) -> dict[str, torch.Tensor]:
    leaf = torch.arange(6.0).reshape(2, 3)
    complex_ = torch.complex(leaf, leaf)
    return {
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "transposed": leaf.T,
        "expanded": torch.ones(1).expand(4),
        "needs gradient": leaf.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(leaf),
        "conjugate": complex_.conj(),
        "negated": complex_.conj().imag,
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def test_awkward_tensors_keep_shape_and_values(worlds: Worlds):
    found = worlds.world(1).run(awkward)[0]
    for name, expected in awkward(None).items():  # type: ignore[arg-type]  # it uses no context
        torch.testing.assert_close(
            found[name], expected.detach(), rtol=0, atol=0, equal_nan=True, check_stride=False
        )
    assert found["not finite"][2].signbit()
    assert not found["needs gradient"].requires_grad
    found["empty"].add_(1)  # writable: it owns its memory


def test_a_dtensor_is_refused_as_a_result(worlds: Worlds):
    with pytest.raises(RankRaised, match=r"got a DTensor of shape .*tensor.to_local\(\)"):
        worlds.world(2).run(dtensor)


def dtensor(ctx: Context) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    return distribute_tensor(torch.ones(2), mesh, [Replicate()])


# ------------------------------------------------------------------- what a body finds in its rank


def draws(ctx: Context) -> tuple[float, float, float, int]:
    return torch.rand(()).item(), float(np.random.rand()), random.random(), ctx.seed


def test_every_generator_is_seeded_by_seed_and_rank(worlds: Worlds):
    world = worlds.world(2)
    large = 2**33 + 5  # beyond what NumPy takes
    first = world.run(draws, seed=large)
    assert world.run(draws, seed=large) == first
    assert first[0] != first[1]
    other = world.run(draws, seed=large + 1)
    for own_draw, other_draw in zip(first[0], other[0], strict=True):
        assert own_draw != other_draw


def surroundings(ctx: Context) -> list[object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    group = str(dist.get_backend()), dist.get_world_size()
    return [
        *group,
        *(os.environ.get(name) for name in names),
        torch.get_num_threads(),
        str(ctx.device),
        "torch._dynamo" in sys.modules,
    ]


def test_a_rank_on_cpu_has_gloo_and_one_thread_no_gpu_and_torch_preloaded(own: Worlds):
    for rank, found in enumerate(own.world(2).run(surroundings)):
        assert found == ["gloo", 2, str(rank), "2", str(rank), "", 1, "cpu", True]


def write_then_list(ctx: Context, word: str) -> list[str]:
    (ctx.scratch / f"{word}{ctx.rank}").touch()
    ctx.barrier()
    return sorted(map(str, ctx.scratch.iterdir()))


def test_the_ranks_of_a_pool_share_a_folder_that_goes_with_it(own: Worlds):
    one, other = own.world(2).run(write_then_list, "x")
    assert one == other
    assert [Path(path).name for path in one] == ["x0", "x1"]
    own.close()
    assert not Path(one[0]).parent.exists()


def sum_in_group(ctx: Context, groups: tuple[tuple[int, ...], ...]) -> tuple[float, list[int]]:
    group = ctx.split(groups)
    tensor = torch.tensor([2.0**ctx.rank])
    dist.all_reduce(tensor, group=group)
    return tensor.item(), dist.get_process_group_ranks(group)


def count_groups(ctx: Context) -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("groups", "sums"),
    [
        (((0, 1), (2, 3)), [3, 3, 12, 12]),
        (((0, 2), (1, 3)), [5, 10, 5, 10]),
        (((0,), (1, 2, 3)), [1, 14, 14, 14]),
    ],
    ids=str,
)
def test_a_world_can_be_cut_into_groups_that_go_with_the_body(worlds: Worlds, groups, sums):
    ranks = worlds.world(4).run(sum_in_group, groups)
    assert [total for total, _ in ranks] == sums
    mine = [list(next(g for g in groups if rank in g)) for rank in range(4)]
    assert [members for _, members in ranks] == mine
    assert ranks.leaks == ()
    assert worlds.world(4).run(count_groups) == [1] * 4


def sum_over_a_mesh(ctx: Context) -> tuple[list[float], int]:
    mesh = ctx.mesh((2, 2), ("rows", "columns"))
    sums = [torch.tensor([2.0**ctx.rank]) for _ in range(2)]
    for total, group in zip(sums, mesh.get_all_groups(), strict=True):
        dist.all_reduce(total, group=group)
    return [total.item() for total in sums], count_groups(ctx)


def threads_of_gloo(ctx: Context) -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    loops = [each for each in tasks if (each / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in loops]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from /proc")
def test_the_groups_of_a_mesh_go_with_the_body_and_their_threads_too(worlds: Worlds):
    world = worlds.world(4)
    ranks = world.run(sum_over_a_mesh)
    assert [sums for sums, _ in ranks] == [[5, 3], [10, 3], [5, 12], [10, 12]]
    assert {groups for _, groups in ranks} == {3}
    assert ranks.leaks == ()
    assert world.run(count_groups) == [1] * 4
    assert world.run(threads_of_gloo) == [[10]] * 4, "the default group's alone, and it gives way"


def test_a_group_that_leaves_a_rank_out_is_refused_there(worlds: Worlds):
    with pytest.raises(RankRaised, match="rank 1 is in none of the groups"):
        worlds.world(2).run(sum_in_group, ((0,),))


# ------------------------------------------------------------------------- life and cost of a pool


def test_no_rank_outlives_its_pool(own: Worlds):
    own.world(3).run(bodies.empty)
    pool = own.pool(3, None, "gloo")
    pids = pool.pids()
    assert len(alive(set(pids))) == 3
    pool.kill()
    pool.kill()  # a second time does no harm
    assert not alive(pids)


def test_a_world_outlives_the_pool_behind_it(own: Worlds):
    world = own.world(2)
    before = world.run(bodies.pid)
    assert world.run(bodies.pid) == before, "the ranks go on living between calls"
    own.close()
    assert not alive(before)
    after = world.run(bodies.pid)
    assert set(after).isdisjoint(before)


def test_the_longest_unused_pool_goes_first(own: Worlds):
    own.max_pools = 2
    first, second = own.world(1), own.world(2)
    pids = first.run(bodies.pid), second.run(bodies.pid)
    first.run(bodies.pid)
    own.world(3).run(bodies.pid)
    assert first.run(bodies.pid) == pids[0]
    assert not alive(pids[1])


def open_things(ctx: Context | None) -> tuple[int, int]:
    gc.collect()  # what an earlier test left to the collector must not end between two counts
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def tensors(ctx: Context) -> list[torch.Tensor]:
    sys.stdout.write("a word for the output file\n")
    return [torch.ones(8) for _ in range(4)]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are read from /proc")
def test_calls_and_pools_leave_nothing_open(own: Worlds):
    closed = []
    for number in range(4):
        world = own.world(2)
        world.run(tensors)
        world.run(open_things)
        before, inside = open_things(None), world.run(open_things)
        for _ in range(1 if number else 20):
            world.run(tensors)
        assert open_things(None) == before
        assert world.run(open_things) == inside
        own.close()
        closed.append(open_things(None))
    # Of the pools of other tests a connection may end meanwhile, so the number may fall.
    (first_files, first_threads), (files, threads) = closed[1], closed[-1]
    assert (files <= first_files, threads <= first_threads) == (True, True), (
        f"pools that come and go leave files or threads: {closed}"
    )
