"""Random programs of collectives: the simulated world must compute what gloo computes.

A program is plain data, drawn from a seed, the same on all ranks: groups, then statements, each
with an operation, a dtype, a shape, a group, whether it is asynchronous, and after which one
it is waited for. Values are small integers, so that sums are exact in every dtype and the
comparison is bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from spec_tests.rig.ranks.rank import Context

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int8", "uint8")
_SHAPES = ((), (1,), (3,), (2, 3), (8,), (0,), (4, 2, 1))


@dataclass(frozen=True)
class Statement:
    """One collective of a program.

    Attributes:
        operation: a key of OPERATIONS.
        dtype, shape: of what a rank contributes.
        group: index into the batch's groups; 0 is the world.
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
class Batch:
    """Groups (ranks of each; the first is the world) and programs that use them.

    Programs share groups since making and ending one takes gloo longer than a program.
    """

    seed: int
    groups: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[Statement, ...], ...]


def draw(seed: int, size: int) -> Batch:
    """The batch of this seed for `size` ranks."""
    chance = random.Random(f"{seed} of {size}")
    some = [sorted(chance.sample(range(size), chance.randint(1, size))) for _ in range(2)]
    groups = (tuple(range(size)), *map(tuple, some))
    programs = [
        tuple(_draw_statement(chance, groups) for _ in range(chance.randint(1, 8)))
        for _ in range(20)
    ]
    return Batch(seed, groups, tuple(programs))


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


def run(ctx: Context, batch: Batch) -> list[list[list[torch.Tensor]]]:
    """Per program and statement, the tensors that this rank holds when all is done."""
    made = [dist.group.WORLD, *(dist.new_group(list(ranks)) for ranks in batch.groups[1:])]
    held = [_run_one(ctx, batch, number, made) for number in range(len(batch.programs))]
    for group in made[1:]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return held


def _run_one(ctx: Context, batch: Batch, number: int, made: list[Any]) -> list[list[torch.Tensor]]:
    held: list[list[torch.Tensor]] = []
    pending: list[tuple[int, partial[None]]] = []
    for index, statement in enumerate(batch.programs[number]):
        if ctx.rank in (ranks := batch.groups[statement.group]):
            values = random.Random(f"{batch.seed} {number} {index} {ctx.rank}")
            call = _Call(statement, made[statement.group], ranks.index(ctx.rank), values)
            tensors, work = OPERATIONS[statement.operation](call)
            held.append(tensors)
            if work is not None:
                end = partial(_end, statement.operation, tensors, work)
                pending.append((index + (statement.wait_after or 0), end))
        for due, end in [entry for entry in pending if entry[0] <= index]:
            end()
            pending.remove((due, end))
    for _, end in pending:
        end()
    return held


def _end(operation: str, tensors: list[torch.Tensor], work: Any) -> None:
    """Wait; what the handle and its future then give is held as well."""
    work.wait()
    if operation not in WITHOUT_RESULT:
        tensors += [*work.result(), *work.get_future().value()]


class _Call:
    """What an operation needs to know of its statement."""

    def __init__(self, statement: Statement, group: Any, rank: int, values: random.Random) -> None:
        self.group, self.size, self.rank = group, group.size(), rank
        self.root, self.is_root = statement.root, statement.root == rank
        self.how = {"group": group, "async_op": statement.wait_after is not None}
        self.reduce = getattr(dist.ReduceOp, statement.reduce)
        self.reduce_name = statement.reduce.lower()
        self._dtype = getattr(torch, statement.dtype)
        self._shape = statement.shape
        self._values = values

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

    def each(self, make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """One such tensor for each rank of the group."""
        return [make() for _ in range(self.size)]

    def at_root(self, make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The same at the root, and nothing elsewhere."""
        return self.each(make) if self.is_root else []


_Result = tuple[list[torch.Tensor], Any]


def _reduce(call: _Call) -> _Result:
    work = dist.reduce(tensor := call.full(), group_dst=call.root, op=call.reduce, **call.how)
    return [tensor] if call.is_root else [], work  # elsewhere it is scratch space


def _all_to_all_single(call: _Call) -> _Result:
    # Rank i sends i + j + 1 rows to rank j: symmetric, and unequal.
    rows = [call.rank + other + 1 for other in range(call.size)]
    received, sent = call.empty(sum(rows)), call.full(sum(rows))
    return [received], dist.all_to_all_single(received, sent, rows, rows, **call.how)


def _coalesced(call: _Call) -> _Result:
    tensors, is_async = [call.full(), call.full(2)], call.how["async_op"]
    with dist._coalescing_manager(group=call.group, async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, call.reduce, call.group)
    return tensors, manager if is_async else None


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
    tensor, received = call.full(), call.each(call.empty)
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


gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ASYNCHRONOUS: dict[str, Callable[[_Call], _Result]] = {
    "all_reduce": lambda c: ([x := c.full()], dist.all_reduce(x, c.reduce, **c.how)),
    "broadcast": lambda c: ([x := c.full()], dist.broadcast(x, group_src=c.root, **c.how)),
    "reduce": _reduce,
    "all_gather": lambda c: (x := c.each(c.empty), dist.all_gather(x, c.full(), **c.how)),
    "all_gather_single": lambda c: ([x := c.empty(c.size)], gather(x, c.full(1), **c.how)),
    "reduce_scatter": lambda c: (
        [x := c.empty()],
        dist.reduce_scatter(x, c.each(c.full), c.reduce, **c.how),
    ),
    "reduce_scatter_single": lambda c: (
        [x := c.empty(1)],
        _scatter(x, c.full(c.size), c.reduce, **c.how),
    ),
    "gather": lambda c: (
        x := c.at_root(c.empty),
        dist.gather(c.full(), x or None, group_dst=c.root, **c.how),
    ),
    "scatter": lambda c: (
        [x := c.empty()],
        dist.scatter(x, c.at_root(c.full) or None, group_src=c.root, **c.how),
    ),
    "all_to_all": lambda c: (x := c.each(c.empty), dist.all_to_all(x, c.each(c.full), **c.how)),
    "all_to_all_single": _all_to_all_single,
    "coalesced": _coalesced,
    "barrier": lambda c: ([], dist.barrier(**c.how)),
}
"""Operation to a function that returns the tensors that it fills, and its work."""
if torch.__version__ < "2.12":  # as versions compare, not as strings
    del ASYNCHRONOUS["all_to_all"]  # of lists: gloo had none, and there is nothing to agree with
WITHOUT_RESULT = ("reduce", "reduce_scatter", "reduce_scatter_single", "coalesced")
"""Of a `reduce` the root alone has one; of the others gloo has none."""
OPERATIONS = ASYNCHRONOUS | {
    "functional": _functional,
    "ring": _ring,
    "to_root": _to_root,
    "objects": _objects,
}


# ---------------------------------------------------------------------------- comparison


def disagreements(batch: Batch, ones: list[Any], others: list[Any]) -> list[str]:
    """Where the ranks of two runs of a batch hold different tensors, in words."""
    return [
        f"rank {rank}, statement {index} of {program}: {mine} and {theirs}"
        for rank in range(len(ones))
        for program, own, foreign in zip(batch.programs, ones[rank], others[rank], strict=True)
        for index, (mine, theirs) in enumerate(zip(own, foreign, strict=True))
        if not all(map(torch.equal, mine, theirs))
    ]
