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


# --------------------------------------------------------------------------------------- results


def awkward(ctx: Context | None = None) -> dict[str, torch.Tensor]:
    leaf = torch.arange(6.0).reshape(2, 3)
    complex_ = torch.complex(leaf, -leaf)
    return {
        **{str(t): (complex_ if t.is_complex else leaf).to(t) for t in DTYPES},
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


def test_a_tensor_of_any_kind_keeps_its_dtype_shape_and_values(worlds: Worlds):
    found = worlds.world(1).run(awkward)[0]
    for name, expected in awkward().items():
        torch.testing.assert_close(
            found[name], expected.detach(), rtol=0, atol=0, equal_nan=True, check_stride=False
        )
    assert found["not finite"][2].signbit()
    assert not found["needs gradient"].requires_grad
    found["empty"].add_(1)  # writable: it owns its memory


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


def count_groups(ctx: Context) -> int:
    return len(dist.distributed_c10d._world.pg_map)


GROUPS = ((0,), (1, 2, 3))


def sums_in_groups(ctx: Context) -> tuple[list[float], list[int], int]:
    """Sums over the rows and columns of a mesh and over GROUPS, whose members follow."""
    cut = ctx.split(GROUPS)
    groups = [*ctx.mesh((2, 2), ("rows", "columns")).get_all_groups(), cut]
    sums = [torch.tensor([2.0**ctx.rank]) for _ in groups]
    for total, group in zip(sums, groups, strict=True):
        dist.all_reduce(total, group=group)
    return [*map(float, sums)], dist.get_process_group_ranks(cut), count_groups(ctx)


def threads_of_gloo(ctx: Context) -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    loops = [each for each in tasks if (each / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in loops]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from /proc")
def test_groups_go_with_the_body_and_their_threads_too(worlds: Worlds):
    world = worlds.world(4)
    ranks = world.run(sums_in_groups)
    sums = [[5, 3, 1], [10, 3, 14], [5, 12, 14], [10, 12, 14]]
    assert [found[0] for found in ranks] == sums
    assert [found[1] for found in ranks] == [[0], *[[1, 2, 3]] * 3]
    assert {groups for _, _, groups in ranks} == {4}
    assert ranks.leaks == ()
    assert world.run(count_groups) == [1] * 4
    threads = world.run(threads_of_gloo)  # the gloo of torch 2.11 does not name them
    is_unnamed = threads == [[]] * 4 and torch.__version__ < "2.13"
    assert threads == [[10]] * 4 or is_unnamed, "the default group's alone, and it gives way"


def split_off_one(ctx: Context) -> None:
    ctx.split(((0,),))


def test_a_group_that_leaves_a_rank_out_is_refused_there(worlds: Worlds):
    with pytest.raises(RankRaised, match="rank 1 is in none of the groups"):
        worlds.world(2).run(split_off_one)


# ------------------------------------------------------------------------- life and cost of a pool


def test_a_world_outlives_the_pool_behind_it(own: Worlds):
    world = own.world(2)
    before = world.run(bodies.pid)
    assert world.run(bodies.pid) == before, "the ranks go on living between calls"
    pool = own.pool(2, None, "gloo")
    own.close()
    pool.kill()  # a second time does no harm
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
    for number in range(3):
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
