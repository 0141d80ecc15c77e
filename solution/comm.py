"""Communication: every collective but those of PyTorch's DTensor and checkpoint library.

Problem. Collectives are where distributed programs hang and where backends differ. Kept in one
file and named by what they mean, they can be counted, replaced and reasoned about; the layers above
are arithmetic and order.

Every function takes `group`, None being the default group. A function that can overlap with compute
returns a `Handle`, and nothing that was passed in may be read or written before `handle.wait()`.
The others (agreement, initial values, numbers for the host, HSDP's sum over replicas) block.

Invariants.
1. All ranks of a group issue the same functions in the same order with equal shapes and dtypes.
   Nothing here checks that; where it must be certain, call `agree`.
2. A group of one rank sends nothing.

Cost. Over W ranks a sum of n bytes sends 2n(W-1)/W per rank, a broadcast of n bytes at most n.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Group = dist.ProcessGroup | None

P = ParamSpec("P")
R = TypeVar("R")

NAMED = "comm."  # begins the annotations of `_named`
_ROWS = 0x726F7773  # the tag of messages that carry rows, so that no other message is taken for one


class Handle(Protocol):
    """A collective in flight. Its tensors belong to it until `wait` returns."""

    def wait(self) -> object:
        """Blocks (on a GPU: makes the current stream wait) until the result is in place."""


class _All:
    """The handle of several collectives; of none where there is nothing to send."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def is_initialized() -> bool:
    """Return whether this process belongs to a distributed run."""
    return dist.is_available() and dist.is_initialized()


def require_group(group: Group, *, caller: str) -> None:
    """Raises unless `group` exists and this process is one of its members."""
    if not is_initialized():
        raise RuntimeError(
            f"{caller} expected an initialised process group, got none; run under torchrun inside "
            "`solution.world.distributed()`, or call torch.distributed.init_process_group first"
        )
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise ValueError(
            f"{caller} expected a process group that contains rank {dist.get_rank()}, "
            f"got {group!r}; only members of a group may use it"
        )


def rank(group: Group = None) -> int:
    """This process's rank inside `group`; 0 when nothing is distributed."""
    return dist.get_rank(group) if is_initialized() else 0


def size(group: Group = None) -> int:
    """Number of ranks in `group`; 1 when nothing is distributed."""
    return dist.get_world_size(group) if is_initialized() else 1


def all_reduce_sum(tensor: torch.Tensor, group: Group) -> Handle:
    """Starts replacing `tensor` (contiguous) on every rank by its sum over the ranks of `group`."""
    if tensor.numel() == 0 or size(group) == 1:
        return _All([])
    work: Handle = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def sum_over_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Replace `tensor` by its sum over ranks, which is needed at once, and return it; blocks."""
    all_reduce_sum(tensor, group).wait()
    return tensor


def max_over_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Replace `tensor` by its maximum over ranks and return it; blocks. NaN may get lost."""
    if size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast(tensor: torch.Tensor, source: int, group: Group) -> Handle:
    """Starts overwriting `tensor` (contiguous) by that of rank `source` of `group`."""
    if tensor.numel() == 0 or size(group) == 1:
        return _All([])
    work: Handle = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    return work


def _named(function: Callable[P, R]) -> Callable[P, R]:
    """Name a collective in traces and in `Traffic` by what is asked for, not by gloo's way to it.

    Without a profiler or a dispatch mode this costs 0.2 microseconds; a gather takes 100 or more.
    """
    name = NAMED + function.__name__

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (profiler._is_profiler_enabled or is_in_torch_dispatch_mode(False)):
            return function(*args, **kwargs)
        with profiler.record_function(name):
            return function(*args, **kwargs)

    return named


@_named
def all_gather_rows(matrix: torch.Tensor, group: Group) -> Handle:
    """Starts filling `matrix` `[W, m]`, whose row of this rank is in place, with all ranks' rows.

    On gloo two ranks broadcast their rows straight into place, in a quarter of the time of its
    all-gather. More ranks use point-to-point messages: gloo hands collectives to two threads per
    group, which carry two broadcasts at a time, but sends messages without them.
    """
    num_ranks = size(group)
    if matrix.numel() == 0 or num_ranks == 1:
        return _All([])
    if matrix.itemsize == 1 or not matrix.is_floating_point():
        matrix = matrix.view(torch.uint8)  # backends do not know all dtypes; rows are not summed
    if _is_gloo(matrix, group):
        if num_ranks == 2 or matrix.device.type != "cpu":  # gloo sends from host memory
            return _All([broadcast(row, source, group) for source, row in enumerate(matrix)])
        return _All(_send_rows(matrix, group))
    # Renamed in torch 2.13. Flat: input and output then share memory in a way that is allowed.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Handle = gather(matrix.view(-1), matrix[rank(group)], group=group, async_op=True)
    return work


def _send_rows(matrix: torch.Tensor, group: Group) -> list[Any]:
    own, num_ranks = rank(group), size(group)
    place: Any = {"group": group, "tag": _ROWS}
    # Each begins with its neighbour, so that no rank receives from all at once.
    others = [(own - step) % num_ranks for step in range(1, num_ranks)]
    received = [dist.irecv(matrix[source], group_src=source, **place) for source in others]
    sent = [dist.isend(matrix[own], group_dst=target, **place) for target in reversed(others)]
    return [*received, *sent]


@_named
def reduce_scatter_sum(matrix: torch.Tensor, group: Group) -> tuple[torch.Tensor, Handle]:
    """Starts summing `matrix` `[W, m]` (used up) over ranks; each gets the sum of its row `[m]`.

    On gloo a slice of an all-reduce: the bits of its reduce-scatter in 0.6 of the time.
    """
    own = matrix[rank(group)]
    if size(group) == 1 or _is_gloo(matrix, group):
        return own, all_reduce_sum(matrix, group)
    own = torch.empty_like(own)
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return own, reduce(own, matrix.view(-1), group=group, async_op=True)


def _is_gloo(tensor: torch.Tensor, group: Group) -> bool:
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return f"{tensor.device.type}:gloo" in config.split(",")


def agree(value: int, group: Group) -> bool:
    """Return, on every rank, whether `value` (below 2**63) is the same on all ranks of `group`."""
    if size(group) == 1:
        return True
    # Not where this rank's own tensors lie: that may be what differs between ranks.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    # The largest value and the negative of the smallest, in one collective.
    extremes = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, negative_smallest = extremes.tolist()
    return bool(largest == -negative_smallest)


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Every rank's plain `value`, in order of rank, on every rank; for agreement, not for data."""
    if size(group) == 1:
        return [value]
    values: list[Any] = [None] * size(group)
    dist.all_gather_object(values, value, group=group)
    return values
