"""Random programs of collectives: the simulated world must compute what gloo computes.

A program is plain data, drawn from a seed, the same on all ranks: groups, then statements, each
with an operation, a dtype, a shape, a group, whether it is asynchronous, and after which one
it is waited for. Values are small integers, so that sums are exact in every dtype and the
comparison is bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int8", "uint8")
_SHAPES = ((), (1,), (3,), (2, 3), (8,), (0,), (4, 2, 1))


@dataclass(frozen=True)
class Statement:
    """One collective of a program.

    Attributes:
        operation: a key of OPERATIONS.
        dtype, shape: of what a rank contributes.
        group: index into the program's groups; 0 is the world.
        root: rank within the group; the peer of sends.
        reduce: name of the reduce operator.
        wait_after: how many statements later it is waited for; None blocks.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    group: int
    root: int
    reduce: str
    wait_after: int | None


@dataclass(frozen=True)
class Program:
    """Groups (ranks of each; the first is the world) and statements."""

    seed: int
    groups: tuple[tuple[int, ...], ...]
    statements: tuple[Statement, ...]


BATCH = 20
"""So many programs have the same groups: making and ending one takes gloo longer than a program."""


def batches(first: int, count: int, size: int) -> Iterator[list[Program]]:
    """The programs of seeds `first` .. `first + count - 1` for `size` ranks, BATCH at a time."""
    for begin in range(first, first + count, BATCH):
        yield [draw(seed, size) for seed in range(begin, min(begin + BATCH, first + count))]


def draw(seed: int, size: int) -> Program:
    """The program of this seed for `size` ranks."""
    chance = random.Random(f"groups {seed // BATCH} of {size}")
    some = [sorted(chance.sample(range(size), chance.randint(1, size))) for _ in range(2)]
    groups = [tuple(range(size)), *map(tuple, some)]
    chance = random.Random(f"{seed} of {size}")
    statements = tuple(_draw_statement(chance, groups) for _ in range(chance.randint(1, 8)))
    return Program(seed, tuple(groups), statements)


def _draw_statement(chance: random.Random, groups: Sequence[tuple[int, ...]]) -> Statement:
    operation = chance.choice(sorted(OPERATIONS))
    dtype = chance.choice(_FLOATS + _INTEGERS)
    names = ["SUM", "SUM", "MIN", "MAX", "PRODUCT"]
    names += ["BAND", "BOR", "BXOR"] if dtype in _INTEGERS else []
    group = chance.randrange(len(groups))
    return Statement(
        operation,
        dtype,
        chance.choice(_SHAPES),
        group,
        chance.randrange(len(groups[group])),
        chance.choice(names),
        chance.choice((None, 0, 1, 3)) if operation in ASYNCHRONOUS else None,
    )


# ------------------------------------------------------------------------------ on a rank


def run(ctx: Context, programs: Sequence[Program]) -> list[list[list[torch.Tensor]]]:
    """Per program and statement, the tensors that this rank holds when all is done.

    The programs must have the same groups.
    """
    assert len({program.groups for program in programs}) == 1
    made = [dist.group.WORLD, *(dist.new_group(list(ranks)) for ranks in programs[0].groups[1:])]
    held = [_run_one(ctx, program, made) for program in programs]
    for group in made[1:]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return held


def _run_one(ctx: Context, program: Program, made: list[Any]) -> list[list[torch.Tensor]]:
    held: list[list[torch.Tensor]] = []
    pending: list[tuple[int, Any]] = []
    for index, statement in enumerate(program.statements):
        if ctx.rank in program.groups[statement.group]:
            call = _Call(ctx, program, index, statement, made[statement.group])
            tensors, work = OPERATIONS[statement.operation](call)
            held.append(tensors)
            if work is not None:
                pending.append((index + (statement.wait_after or 0), work))
        for due, work in [entry for entry in pending if entry[0] <= index]:
            work.wait()
            pending.remove((due, work))
    for _, work in pending:
        work.wait()
    return held


class _Call:
    """What an operation needs to know of its statement."""

    def __init__(
        self, ctx: Context, program: Program, index: int, statement: Statement, group: Any
    ) -> None:
        ranks = program.groups[statement.group]
        self.group, self.size, self.rank = group, len(ranks), ranks.index(ctx.rank)
        self.root, self.is_root = statement.root, statement.root == self.rank
        self.is_async = statement.wait_after is not None
        self.reduce = getattr(dist.ReduceOp, statement.reduce)
        self.reduce_name = statement.reduce.lower()
        self._dtype = getattr(torch, statement.dtype)
        self._shape = statement.shape
        self._values = random.Random(f"{program.seed} {index} {self.rank}")

    def full(self, *lead: int) -> torch.Tensor:
        """A contribution; `lead` multiplies the first dimension."""
        shape = (*lead, *self._shape)
        count = torch.Size(shape).numel()
        low = 0 if self._dtype is torch.uint8 else -3
        values = [self._values.randint(low, 3) for _ in range(count)]
        return torch.tensor(values, dtype=self._dtype).reshape(shape)

    def empty(self, *lead: int) -> torch.Tensor:
        """Room for a result."""
        return torch.zeros((*lead, *self._shape), dtype=self._dtype)


_Result = tuple[list[torch.Tensor], Any]


def _all_reduce(call: _Call) -> _Result:
    tensor = call.full()
    return [tensor], dist.all_reduce(tensor, call.reduce, call.group, call.is_async)


def _broadcast(call: _Call) -> _Result:
    tensor = call.full()
    work = dist.broadcast(tensor, group=call.group, group_src=call.root, async_op=call.is_async)
    return [tensor], work


def _reduce(call: _Call) -> _Result:
    tensor = call.full()
    work = dist.reduce(
        tensor, group=call.group, group_dst=call.root, op=call.reduce, async_op=call.is_async
    )
    return [tensor] if call.is_root else [], work  # elsewhere it is scratch space


def _all_gather(call: _Call) -> _Result:
    rows = [call.empty() for _ in range(call.size)]
    return rows, dist.all_gather(rows, call.full(), call.group, call.is_async)


def _all_gather_single(call: _Call) -> _Result:
    rows = call.empty(call.size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return [rows], gather(rows, call.full(1), call.group, call.is_async)


def _reduce_scatter(call: _Call) -> _Result:
    own, rows = call.empty(), [call.full() for _ in range(call.size)]
    return [own], dist.reduce_scatter(own, rows, call.reduce, call.group, call.is_async)


def _reduce_scatter_single(call: _Call) -> _Result:
    own, rows = call.empty(1), call.full(call.size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return [own], scatter(own, rows, call.reduce, call.group, call.is_async)


def _gather(call: _Call) -> _Result:
    rows = [call.empty() for _ in range(call.size)] if call.is_root else None
    work = dist.gather(
        call.full(), rows, group=call.group, group_dst=call.root, async_op=call.is_async
    )
    return rows or [], work


def _scatter(call: _Call) -> _Result:
    own, rows = call.empty(), [call.full() for _ in range(call.size)] if call.is_root else None
    work = dist.scatter(own, rows, group=call.group, group_src=call.root, async_op=call.is_async)
    return [own], work


def _all_to_all(call: _Call) -> _Result:
    received = [call.empty() for _ in range(call.size)]
    sent = [call.full() for _ in range(call.size)]
    return received, dist.all_to_all(received, sent, call.group, call.is_async)


def _all_to_all_single(call: _Call) -> _Result:
    # Rank i sends i + j + 1 rows to rank j: symmetric, and unequal.
    rows = [call.rank + other + 1 for other in range(call.size)]
    received, sent = call.empty(sum(rows)), call.full(sum(rows))
    return [received], dist.all_to_all_single(received, sent, rows, rows, call.group, call.is_async)


def _coalesced(call: _Call) -> _Result:
    tensors = [call.full(), call.full(2)]
    with dist._coalescing_manager(group=call.group, async_ops=call.is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, call.reduce, call.group)
    return tensors, manager if call.is_async else None


def _functional(call: _Call) -> _Result:
    total = functional.all_reduce(call.full(), call.reduce_name, call.group)
    rows = functional.all_gather_tensor(call.full(1), 0, call.group)
    return [total + 0, rows + 0], None  # an operator waits for its inputs


def _ring(call: _Call) -> _Result:
    tensor, received = call.full(), call.empty()
    if call.size == 1:
        return [tensor], None
    following, preceding = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=call.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=call.group, group_peer=preceding),
        ]
    )
    for work in works:
        work.wait()
    return [received], None


def _to_root(call: _Call) -> _Result:
    tensor, received = call.full(), [call.empty() for _ in range(call.size)]
    if not call.is_root:
        dist.send(tensor, group=call.group, group_dst=call.root, tag=call.rank)
        return [], None
    for rank in reversed(range(call.size)):
        if rank != call.rank:
            dist.recv(received[rank], group=call.group, group_src=rank, tag=rank)
    return received, None


def _objects(call: _Call) -> _Result:
    everybody: list[Any] = [None] * call.size
    dist.all_gather_object(everybody, (call.rank, "x" * call.rank), group=call.group)
    return [torch.tensor([rank for rank, _ in everybody])], None


def _barrier(call: _Call) -> _Result:
    return [], dist.barrier(call.group, async_op=call.is_async)


OPERATIONS: dict[str, Callable[[_Call], _Result]] = {
    name.removeprefix("_"): operation
    for name, operation in list(globals().items())
    if callable(operation) and getattr(operation, "__annotations__", {}).get("return") == "_Result"
}
if torch.__version__ < "2.12":  # as versions compare, not as strings
    del OPERATIONS["all_to_all"]  # of lists: gloo had none, and there is nothing to agree with
ASYNCHRONOUS = sorted(OPERATIONS.keys() - {"functional", "ring", "to_root", "objects"})


# ---------------------------------------------------------------------------- comparison


def disagreements(programs: Sequence[Program], sim: World, gloo: World) -> list[str]:
    """Run every program on both; what differs, in words."""
    simulated, lived = sim.run(run, programs), gloo.run(run, programs)
    return [
        f"rank {rank} of {sim.size}, statement {index} of {program}: {mine} and {theirs}"
        for rank in range(sim.size)
        for program, ours, others in zip(programs, simulated[rank], lived[rank], strict=True)
        for index, (mine, theirs) in enumerate(zip(ours, others, strict=True))
        if not all(map(torch.equal, mine, theirs))
    ]
