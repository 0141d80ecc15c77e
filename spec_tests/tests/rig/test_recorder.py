"""The recorder: every collective by its meaning and size, whoever issued it; bytes that live."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from spec_tests.programs.laws import agreement, traffic
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.recorder import Event, Kind, Log, Recorder
from spec_tests.rig.ranks.world import Worlds

N = 6
"""Elements that each rank hands in; the world has two."""


group = dist.distributed_c10d._get_default_group


def half(x: torch.Tensor) -> torch.Tensor:
    """Room for what a rank gets of a tensor that is scattered."""
    return x.new_empty(N // 2)


BY_MEANING: dict[tuple[Kind, int], dict[str, Callable[[torch.Tensor], object]]] = {
    (Kind.REDUCTION, N): {
        "all_reduce": dist.all_reduce,
        "all_reduce, asynchronous": lambda x: dist.all_reduce(x, async_op=True).wait(),
        "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x[:4], x[4:]]),
        "reduce": lambda x: dist.reduce(x, dst=0),
        "reduce_scatter": lambda x: dist.reduce_scatter(half(x), list(x.clone().chunk(2))),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(half(x), x),
        "functional all_reduce": lambda x: functional.all_reduce(x, "sum", group()) + 1,
        "functional reduce_scatter": lambda x: (
            functional.reduce_scatter_tensor(x, "sum", 0, group()) + 1
        ),
    },
    (Kind.BROADCAST, N): {"broadcast": lambda x: dist.broadcast(x, src=0)},
    (Kind.GATHER, 2 * N): {
        "all_gather": lambda x: dist.all_gather([x.clone(), x.clone()], x),
        "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x.new_empty(2 * N), x),
        "functional all_gather": lambda x: functional.all_gather_tensor(x, 0, group()) + 1,
        "all_to_all, the same to all": lambda x: dist.all_to_all([x.clone(), x.clone()], [x, x]),
        "all_to_all_single, the same to all": lambda x: dist.all_to_all_single(
            x.new_empty(2 * N), x.repeat(2)
        ),
    },
    (Kind.EXCHANGE, N): {
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
        "all_to_all_single of zeros": lambda x: dist.all_to_all_single(x.clone(), 0 * x),
        "all_to_all": lambda x: dist.all_to_all([half(x), half(x)], list(x.chunk(2))),
        "functional all_to_all": lambda x: (
            functional.all_to_all_single(x, [N // 2] * 2, [N // 2] * 2, group()) + 1
        ),
    },
}
"""Kind and elements, as the recorder must tell them, to the calls that mean this."""
COLLECTIVES = [
    (name, call, meaning) for meaning, calls in BY_MEANING.items() for name, call in calls.items()
]


def letter(x: torch.Tensor) -> None:
    dist.send(x, dst=1) if dist.get_rank() == 0 else dist.recv(x, src=0)


def dtensor(x: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()


OTHERS: list[tuple[str, Callable[[torch.Tensor], object], list[tuple[Kind, int]]]] = [
    ("letter", letter, [(Kind.SEND, N), (Kind.RECEIVE, N)]),
    ("barrier", lambda x: dist.barrier(), [(Kind.BARRIER, 1)] * 2),
    ("DTensor", dtensor, [(Kind.GATHER, 2 * N)] * 2),
]
"""Calls, and the kind and elements that each of the two ranks sees."""


def record(ctx: Context) -> list[Log]:
    logs = []
    for _, call, _ in (*COLLECTIVES, *OTHERS):
        x = torch.arange(1, N + 1, dtype=torch.bfloat16)
        with ctx.recording() as recorder:
            call(x)
        logs.append(recorder.log())
    return logs


@pytest.mark.filterwarnings("ignore")
def test_a_collective_is_seen_once_with_its_meaning_and_size(worlds: Worlds):
    for rank, logs in enumerate(worlds.world(2).run(record)):
        wanted = [(name, meaning) for name, _, meaning in COLLECTIVES]
        wanted += [(name, meanings[rank]) for name, _, meanings in OTHERS]
        for (name, meaning), log in zip(wanted, logs, strict=True):
            (event,) = log.collectives()
            assert (event.kind, event.numel) == meaning, name
            assert log.collectives(*(set(Kind) - {event.kind})) == (), name
        for event in (log.collectives()[0] for log in logs[: len(COLLECTIVES)]):
            assert (event.bytes, event.dtypes) == (2 * event.numel, ("bfloat16",))


def rows_by_messages(ctx: Context) -> Log:
    """Every rank sends its row of a matrix to the others."""
    matrix = torch.ones(ctx.world_size, N)
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    with ctx.recording() as recorder:
        works: list[Any] = [dist.irecv(matrix[other], src=other) for other in others]
        works += [dist.isend(matrix[ctx.rank], dst=other) for other in others]
        for work in works:
            work.wait()
    return recorder.log()


@pytest.mark.parametrize("transport", ["gloo", "sim"])
def test_a_gather_by_point_to_point_messages_counts_as_a_gather(worlds: Worlds, transport: str):
    for log in worlds.world(3, transport=transport).run(rows_by_messages):
        assert traffic.gathered(log, 3) == 3 * N
        assert len(log.collectives(*traffic.GATHERS)) == 2


# ------------------------------------------------------------------------- what laws make of logs


def log_of(*events: tuple[str, Kind, int]) -> Log:
    """A log of collectives of float32 as (operator, kind, elements)."""
    return Log(tuple(Event(f"c10d.{o}", k, n, 4 * n, ("float32",)) for o, k, n in events), 0)


def gathers(*sizes: int, to: str = "gather_") -> list[Log]:
    """A gather on each rank, of so many elements."""
    return [log_of((to, Kind.GATHER, size)) for size in sizes]


REDUCED = ("allreduce_", Kind.REDUCTION, 8)


@pytest.mark.parametrize(
    ("logs", "is_once"),
    [
        (gathers(30, 10, 10), True),
        (gathers(15, 5, 5), False),  # half of it
        (gathers(60, 20, 20), False),
        (gathers(30, 30, 30, to="allgather_"), True),
        (gathers(15, 15, 15, to="allgather_"), False),
        ([log_of(REDUCED, ("allgather_", Kind.GATHER, 30))] * 3, False),  # a bucket is lost
    ],
)
def test_what_is_gathered_and_added_up_is_reduced_once(logs: list[Log], is_once: bool):
    with contextlib.nullcontext() if is_once else pytest.raises(AssertionError):
        traffic.reduced_once(logs, numel=10, bookkeeping=2, by_hand=True)
    with pytest.raises(AssertionError):
        traffic.reduced_once(logs, numel=10, bookkeeping=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_what_is_no_floating_point_number_is_bookkeeping(dtype: str):
    log = Log((Event("c10d.allgather_", Kind.GATHER, 8, 16, (dtype,)),), 0)
    assert traffic.volume(log, Kind.GATHER) == 8 * ("float" in dtype)
    assert len(traffic.without_gathers(log).events) == ("float" not in dtype)


@pytest.mark.parametrize("times", [1, 2])
def test_owners_of_unequal_shares_send_one_copy_by_messages(times: int):
    shares = (6, 2, 0)
    logs = []
    for own in shares:
        received = [("recv_", Kind.RECEIVE, other) for other in shares if other != own]
        logs.append(log_of(*[*[("send", Kind.SEND, own)] * 2, *received] * times))
    assert [traffic.gathered(log, 3) for log in logs] == [8 * times] * 3
    with contextlib.nullcontext() if times == 1 else pytest.raises(AssertionError):
        traffic.sent_once(logs, numel=8)


def test_ranks_issue_the_same_collectives_whatever_is_theirs_by_role():
    letters = [log_of(("send", Kind.SEND, 4)), log_of(("recv_", Kind.RECEIVE, 4))]
    for alike in (gathers(20, 10), gathers(10, 10, to="allgather_"), letters):
        agreement.same_collectives(alike)
    shorter = [*gathers(20), *letters]
    for unlike in (gathers(20, 12), gathers(20, 10, to="allgather_"), shorter):
        with pytest.raises(AssertionError):
            agreement.same_collectives(unlike)


# ----------------------------------------------------------------------------------------- bytes


@pytest.fixture
def recorder():
    with Recorder() as entered:
        yield entered


def test_what_is_made_counts_until_it_and_its_views_are_freed(recorder: Recorder):
    one = torch.zeros(100)
    views = [one.view(10, 10).T[2:], one.detach(), one.split(2)[0], one.unflatten(0, (2, 50))]
    one.add_(1).mul_(2)
    assert recorder.live_bytes == 400
    two = torch.empty(50, dtype=torch.float64)
    del one
    assert recorder.live_bytes == 800, "the views keep the storage"
    del views
    assert recorder.live_bytes == 400
    with Recorder() as inner:
        kept = torch.ones(4)
    assert (inner.live_bytes, recorder.live_bytes) == (16, 416)
    del two, kept
    assert inner.live_bytes == recorder.live_bytes == 0
    assert recorder.log().peak_bytes == 800


def test_what_was_there_before_does_not_count_and_its_gradient_does():
    weight = nn.Parameter(torch.ones(100))
    with Recorder() as recorder:
        (weight * 2).sum().backward()
        weight.detach()[:10].mul_(2)
        assert recorder.live_bytes == 400
        weight.grad = None
        assert recorder.live_bytes == 0
        assert recorder.log().peak_bytes > 400
