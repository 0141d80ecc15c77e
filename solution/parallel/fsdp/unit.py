"""A unit: the parameters that are gathered and reduced together (FSDP2: parameter group).

A gather. The rank's own rows of every parameter are copied into its row of a message (`layout.py`),
cast to the dtype of the computation on the way; the other rows arrive; all are copied out into the
full tensors. A reduction is the way back: full gradients into a message, in the dtype of the
reduction; the mean of its own row comes back to each rank, and is cast to the parameter's dtype.

      gather   shard    -> | row 0 | row 1 | -> full                      W * m elements
      reduce   gradient -> | row 0 | row 1 | -> own row, mean -> shard's gradient

Between start and finish the message belongs to the network, and the processor computes something
else: that is all there is to overlap. On gloo, threads of its own carry it; on nccl, a stream of
its own, which waits for this one where the message starts and lets this one wait where it is
finished. So one order of calls serves both, and no stream is handled here.

Never stale. A full copy is current as long as neither an optimizer has stepped over its parameters
nor a version counter has moved (foreach updates move none). Both are the same on all ranks, so all
of them gather again, or none. What neither tells, `torch._foreach_*` or `.data` outside of an
optimizer, needs a `reshard()`.

PyTorch counterpart: `FSDPParamGroup`. There a copy that outlives its backward is used again
whatever happened to the shards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from solution import comm
from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.layout import layout_of, rows_of
from solution.parallel.fsdp.message import Buffers, Message, copy, outside_of_autograd
from solution.parallel.fsdp.param import ShardedParameter
from solution.parallel.fsdp.policy import MixedPrecisionPolicy
from solution.parallel.fsdp.reduction import Divisors, Reduction

K = TypeVar("K", bound=Hashable)


class State(Enum):
    """Where a unit's values are, beside the shards.

    - SHARDED: nowhere.
    - PART: in rows of larger pieces, those of a group of neighbours; only after a forward.
    - GATHERING: under way, in messages of W * m elements.
    - FULL: in the full tensors.
    """

    SHARDED = auto()
    PART = auto()
    GATHERING = auto()
    FULL = auto()


class Unit:
    """What is gathered and reduced together.

    Attributes:
        modules: most units have one.
        name: of the modules, in the outermost sharded one.
        parameters: in the order in which they lie in messages.
        reshard_after_forward: None is True except for the outermost unit; an int is True, too, but
            keeps a part.
        reshard_after_backward, unshards_in_backward, reduces, all_reduces, divide_factor: see the
            setters of `FSDPModule`.
        prefetch_in_forward, prefetch_in_backward: units whose gather starts with this one's use;
            empty lets the schedule choose.
        is_in_backward: its gradients are being computed.
        was_kept: it was full before the forward that is running.
        depth: how many calls of its modules are running, one inside of another.
        to_run: its modules that have not run yet since the first of them did.
        hooks, buffers: the schedule's.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: list[ShardedParameter],
        grid: Grid,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.name = ""
        self.modules = modules
        self.parameters = parameters
        self.grid = grid
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.reduces = True
        self.all_reduces = True
        self.divide_factor: float | None = None
        self.prefetch_in_forward: list[Unit] = []
        self.prefetch_in_backward: list[Unit] = []
        self.is_in_backward = False
        self.was_kept = False
        self.hooks: list[RemovableHandle] = []
        self.depth = 0
        self.to_run: set[nn.Module] = set()
        self.buffers = Buffers()
        self.state = State.SHARDED
        self.num_updates = 0  # steps of optimizers that hold parameters of this unit
        self._gathered: tuple[object, ...] = ()  # what the values gathered were
        self._under_way: list[tuple[Message, comm.Handle]] = []
        self._parts: dict[torch.dtype, torch.Tensor] = {}  # [m] of the smaller group, by dtype
        self._part_group = None
        if type(reshard_after_forward) is int:
            self._part_group = grid.part(reshard_after_forward)
        _watch_optimizers(self)

    # ------------------------------------------------------------------------------------ gather

    def start_gather(self) -> None:
        """Send the shards around, unless that has been done; waited for by `finish_gather`."""
        if self.state in (State.GATHERING, State.FULL):
            return
        is_part = self.state is State.PART
        if not is_part:
            self._gathered = self._versions()
            self._require_values()
        group = self._part_group if is_part else self.grid.shard_group
        with outside_of_autograd():
            for dtype, parameters in _grouped(self.parameters, self._computing_dtype):
                message = self.buffers.take(parameters, dtype, group)
                if is_part:
                    message.matrix[comm.rank(group)].copy_(self._parts.pop(dtype))
                else:
                    message.fill_own([p.local for p in parameters])
                self._under_way.append((message, comm.all_gather_rows(message.matrix, group)))
        self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Wait for the values and let the module compute with them."""
        if self.state is State.GATHERING:
            with outside_of_autograd():
                for message, handle in self._under_way:
                    handle.wait()
                    message.copy_to([p.allocate(message.matrix.dtype) for p in message.parameters])
                    self.buffers.give(message)
            self._under_way.clear()
            self.state = State.FULL
        for parameter in self.parameters:
            parameter.register_full()

    def reshard(self, *, keep_part: bool = False) -> None:
        """Give the full values back; a gather under way is waited for and forgotten."""
        self.register_sharded()
        for message, handle in self._under_way:
            handle.wait()
            self.buffers.give(message)
        self._under_way.clear()
        self._parts.clear()
        if keep_part:
            self._keep_part()
        if self.state is State.FULL:
            for parameter in self.parameters:
                parameter.free()
        self.state = State.PART if keep_part else State.SHARDED

    def drop_outdated(self) -> None:
        """Forget what was gathered, or is on its way, if the shards have changed since."""
        if self.state is not State.SHARDED and self._gathered != self._versions():
            self.reshard()

    def register_sharded(self) -> None:
        """Let everybody see the shards, whether or not full values are kept."""
        for parameter in self.parameters:
            parameter.register_sharded()

    def _keep_part(self) -> None:
        rank, num_ranks = comm.rank(self._part_group), comm.size(self._part_group)
        with outside_of_autograd():
            for dtype, parameters in _grouped(self.parameters, self._computing_dtype):
                fulls = [p.full for p in parameters if p.full is not None]
                layout = layout_of(tuple(p.shape for p in parameters), num_ranks)
                row = torch.empty(layout.width, dtype=dtype, device=fulls[0].device)
                rows = [full[rows_of(full.shape[0], rank, num_ranks)] for full in fulls]
                copy(list(zip(layout.pieces(row, rank), rows, strict=True)))
                self._parts[dtype] = row

    def _require_values(self) -> None:
        for parameter in self.parameters:
            if parameter.local.is_meta:
                raise ValueError(
                    f"expected {parameter.name!r} of {self.name} to have values by the first "
                    "forward, got one on the meta device; call to_empty(device=...) on the sharded "
                    "model, and initialise or load it"
                )

    def _computing_dtype(self, parameter: ShardedParameter) -> torch.dtype:
        return self.policy.param_dtype or parameter.local.dtype

    def _versions(self) -> tuple[object, ...]:
        return self.num_updates, *(parameter.versions() for parameter in self.parameters)

    # -------------------------------------------------------------------------------- gradients

    @property
    def sends(self) -> bool:
        """Whether a backward's gradients leave it; where rows are whole, for replicas only."""
        return self.reduces and not (self.leaves_replicas and self.grid.num_ranks == 1)

    @property
    def leaves_replicas(self) -> bool:
        """Whether replicas are not averaged yet."""
        return not self.all_reduces and self.grid.replica_group is not None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to be taken, or to be sent."""
        sends = self.sends
        return any(p.is_left or (sends and p.is_waiting) for p in self.parameters)

    def take_gradients(self) -> None:
        """Make what a backward left on the full tensors pending."""
        with outside_of_autograd():
            for parameter in self.parameters:
                # What is sent at once is cast on its way into the message.
                parameter.take_gradient(None if self.sends else self.policy.reduce_dtype)
                if not self.leaves_replicas:
                    parameter.complete_partial()

    def start_reduction(self) -> list[Reduction]:
        """Send what is pending; each is waited for by its `finish`."""
        pending = [p for p in self.parameters if p.pending is not None]
        with outside_of_autograd():
            return [self._send(members) for _, members in _grouped(pending, self._dtypes)]

    def _dtypes(self, parameter: ShardedParameter) -> tuple[torch.dtype, torch.dtype]:
        """Of a gradient on its way, and of the gradient that the optimizer sees."""
        assert parameter.pending is not None
        return self.policy.reduce_dtype or parameter.pending.dtype, parameter.local.dtype

    def _send(self, parameters: list[ShardedParameter]) -> Reduction:
        gradients = [p.pending for p in parameters if p.pending is not None]
        dtype, _ = self._dtypes(parameters[0])
        message = self.buffers.take(parameters, dtype, self.grid.shard_group)
        message.fill(gradients)
        partials = [parameter.release_pending() for parameter in parameters]
        divisors = Divisors.of(dtype, self.grid, self.divide_factor)
        if divisors.before > 1:
            message.matrix.div_(divisors.before)
        own, handle = self.grid.start_sum(message.matrix)
        return Reduction(
            self.grid,
            self.buffers,
            message,
            own,
            partials,
            handle,
            divisors,
            is_partial=self.leaves_replicas,
        )


def _grouped(
    parameters: Iterable[ShardedParameter], key: Callable[[ShardedParameter], K]
) -> list[tuple[K, list[ShardedParameter]]]:
    groups: dict[K, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return list(groups.items())


_watching: weakref.WeakSet[Unit] = weakref.WeakSet()


def _watch_optimizers(unit: Unit) -> None:
    """Count the steps over its parameters, for as long as it lives."""
    _register_once()
    _watching.add(unit)


@functools.cache
def _register_once() -> None:
    # Never removed: a hook that goes with its model may go in the middle of a step, by the garbage
    # collector's hand, while PyTorch is walking through its hooks.
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    units = list(_watching)
    if not units:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for unit in units:
        unit.num_updates += any(id(p.sharded) in stepped for p in unit.parameters)
