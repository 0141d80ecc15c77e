"""FSDP units: the parameters that are all-gathered and reduced together.

A unit is what FSDP2 calls a parameter group. In an all-gather the rank's own rows of every
parameter are copied into its row of a message (`message.py`), cast to `param_dtype` on the way; the
other rows arrive; all are copied to the unsharded tensors. A reduction is the way back: unsharded
gradients are copied into a message, in the dtype of the reduction; each rank receives the mean of
its own row, cast to the parameter's dtype. For a gradient that this rank does not have it sends
zeros of a kind that tells whether any rank has one.

      all-gather       shard    -> | row 0 | row 1 | -> unsharded               W * m elements
      reduce-scatter   gradient -> | row 0 | row 1 | -> own row, mean -> shard's gradient

On an HSDP mesh replicas then sum their rows, now or in a later micro-batch.

While a message is in flight the processor computes something else. On gloo its own threads carry
it; on nccl a stream of its own, which waits for the current stream where the message starts, and
for which the current stream waits where it is finished. So one order of calls serves both backends.

Never stale. An unsharded copy is current as long as neither an optimizer has stepped over its
parameters nor a version counter has moved (foreach updates move none). Every rank has to make the
same updates, a rank whose shards are empty as well: then all of them gather again, or none. After
changes that neither shows, `torch._foreach_*` or `.data` outside of an optimizer, call `reshard()`.

PyTorch counterpart: `FSDPParamGroup` and `foreach_reduce`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from solution import comm
from solution.parallel.fsdp.message import (
    BufferPool,
    Message,
    copy,
    is_absent,
    layout_of,
    outside_of_autograd,
)
from solution.parallel.fsdp.options import MixedPrecisionPolicy, ShardingMesh, refuse_extensions
from solution.parallel.fsdp.param import ShardedParameter
from solution.parallel.inventory import Inventory


class UnitState(Enum):
    """What a unit has in memory, beside the shards.

    - SHARDED: nothing.
    - PARTLY_SHARDED: the pieces of fewer ranks, about W * m / `reshard_after_forward` elements (W
      ranks shard, m elements each: `message.py`); only after a forward.
    - GATHERING: messages of W * m elements; an all-gather is in flight.
    - UNSHARDED: the unsharded parameters.
    """

    SHARDED = auto()
    PARTLY_SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


@dataclass(eq=False, repr=False)
class Unit:
    """The parameters that are all-gathered and reduced together."""

    modules: Sequence[nn.Module]  # whose parameters they are; usually one
    parameters: list[ShardedParameter]  # in the order in which they lie in messages
    mesh: ShardingMesh
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None  # None is True except for the outermost unit
    inventory: Inventory  # of the parts of the modules that no other unit has

    # Settings: see the methods of `FSDPModule` that set them.
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    reduces: bool = True
    all_reduces: bool = True
    divide_factor: float | None = None
    forward_prefetch: list[Unit] = field(default_factory=list)  # empty: the schedule chooses
    backward_prefetch: list[Unit] = field(default_factory=list)  # likewise

    # What the schedule knows of the unit.
    name: str = ""  # of the modules, in the outermost sharded one
    buffers: BufferPool = field(default_factory=BufferPool)  # of the schedule, shared
    hooks: list[RemovableHandle] = field(default_factory=list)  # on the modules
    is_in_backward: bool = False  # its gradients are being computed
    was_kept: bool = False  # it was unsharded before the forward that is running
    first_node: int = 0  # number of the first node that autograd makes in that forward
    depth: int = 0  # how many calls of its modules are running, one inside another
    to_run: set[nn.Module] = field(default_factory=set)  # not run yet since the first of them did

    state: UnitState = UnitState.SHARDED  # what is in memory
    num_updates: int = 0  # steps of optimizers that hold parameters of this unit
    _gathered_versions: tuple[object, ...] = ()
    _in_flight: list[tuple[Message, comm.Handle]] = field(default_factory=list)
    _parts: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)  # [m] of `_part_group`
    _part_group: comm.Group = None

    def __post_init__(self) -> None:
        if type(self.reshard_after_forward) is int:
            self._part_group = self.mesh.part(self.reshard_after_forward)
        _register_once()
        _watching.add(self)

    # ------------------------------------------------------------------------------------ gather

    def unshard(self) -> None:
        """Start the all-gather, if it is needed; waited for by `wait_for_unshard`."""
        if self.state in (UnitState.GATHERING, UnitState.UNSHARDED):
            return
        is_part = self.state is UnitState.PARTLY_SHARDED
        if not is_part:
            self._gathered_versions = self._versions()
            self._require_values()
        group = self._part_group if is_part else self.mesh.shard_group
        with outside_of_autograd():
            for dtype, parameters in _grouped(self.parameters, self._param_dtype):
                message = self.buffers.take(parameters, dtype, group)
                if is_part:
                    message.matrix[comm.rank(group)].copy_(self._parts.pop(dtype))
                else:
                    message.fill_own([p.local for p in parameters])
                self._in_flight.append((message, comm.all_gather_rows(message.matrix, group)))
        self.state = UnitState.GATHERING

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather; register the unsharded parameters in the modules.

        Does nothing while the unit is sharded.
        """
        if self.state is UnitState.GATHERING:
            with outside_of_autograd():
                for message, handle in self._in_flight:
                    handle.wait()
                    message.copy_to([p.allocate(message.matrix.dtype) for p in message.parameters])
                    self.buffers.give_back(message)
            self._in_flight.clear()
            self.state = UnitState.UNSHARDED
        if self.state is UnitState.UNSHARDED:
            for parameter in self.parameters:
                parameter.register_unsharded()

    def reshard(self, *, keep_part: bool = False) -> None:
        """Free the unsharded parameters; an all-gather in flight is waited for and discarded."""
        for message, handle in self._in_flight:
            handle.wait()
            self.buffers.give_back(message)
        self._in_flight.clear()
        self._parts.clear()
        self.register_sharded()
        if keep_part:
            self._keep_part()
        if self.state is UnitState.UNSHARDED:
            for parameter in self.parameters:
                parameter.free()
        self.state = UnitState.PARTLY_SHARDED if keep_part else UnitState.SHARDED

    def drop_stale(self) -> None:
        """Reshard if the shards have changed since the all-gather, or are frozen or thawed."""
        if self.state is not UnitState.SHARDED:
            is_fresh = self._gathered_versions == self._versions()
            if not (is_fresh and all(p.trains_alike for p in self.parameters)):
                self.reshard()

    def register_sharded(self) -> None:
        """Register the shards in the modules, whether or not unsharded values are kept."""
        for parameter in self.parameters:
            parameter.register_sharded()

    def _keep_part(self) -> None:
        with outside_of_autograd():
            for dtype, parameters in _grouped(self.parameters, self._param_dtype):
                tensors = [p.unsharded for p in parameters if p.unsharded is not None]
                layout = layout_of(parameters, self._part_group)
                row = torch.empty(layout.width, dtype=dtype, device=tensors[0].device)
                own = [tensor[rows] for tensor, rows in zip(tensors, layout.rows, strict=True)]
                copy(list(zip(layout.pieces(row), own, strict=True)))
                self._parts[dtype] = row

    def _require_values(self) -> None:
        for parameter in self.parameters:
            local = parameter.local
            if parameter.unsharded is None:
                refuse_extensions(local, parameter.name)
            if local.is_meta:
                raise RuntimeError(
                    f"expected {parameter.name!r} of {self.name} to have values by the first "
                    "forward, got one on the meta device; call to_empty(device=...) on the sharded "
                    "model, and initialise or load it"
                )

    def _param_dtype(self, parameter: ShardedParameter) -> torch.dtype:
        dtype = parameter.local.dtype
        return self.policy.param_dtype or dtype if dtype.is_floating_point else dtype

    def _versions(self) -> tuple[object, ...]:
        return self.num_updates, *(parameter.versions() for parameter in self.parameters)

    # -------------------------------------------------------------------------------- gradients

    @property
    def sends(self) -> bool:
        """Whether a backward starts a reduction."""
        return self.reduces and not (self.leaves_replicas and self.mesh.num_shards == 1)

    @property
    def leaves_replicas(self) -> bool:
        """Whether reductions leave the sum over replicas to a later micro-batch."""
        return not self.all_reduces and self.mesh.replica_group is not None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to take, or to send."""
        sends = self.sends
        return any(p.has_local_gradient or (sends and p.has_unsent) for p in self.parameters)

    def take_gradients(self) -> None:
        """Take from autograd what a backward left on the unsharded parameters."""
        # What is sent at once is cast when it is copied into the message.
        dtype = None if self.sends else self.policy.reduce_dtype
        with outside_of_autograd():
            for parameter in self.parameters:
                parameter.accumulate(dtype, sends_partial=not self.leaves_replicas)

    def has_something_to_send(self, *, is_called: bool) -> bool:
        """Whether a reduction is due: of gradients, or of a unit whose backward was called."""
        parameters = self.parameters
        return any(p.unreduced is not None or (is_called and p.is_trained) for p in parameters)

    def start_reduction(self) -> list[Reduction]:
        """Start reducing what is unreduced: one per pair of dtypes, to be ended by the caller.

        All that train go along, so that messages are alike, whichever of them each rank has used.
        """
        sent = [p for p in self.parameters if p.unreduced is not None or p.is_trained]
        with outside_of_autograd():
            return [
                Reduction(self, parameters, dtype)
                for (dtype, _), parameters in _grouped(sent, self._reduced_dtypes)
            ]

    def _reduced_dtypes(self, parameter: ShardedParameter) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the reduction, and of the gradient that the optimizer sees."""
        unreduced = parameter.unreduced
        own = self._param_dtype(parameter) if unreduced is None else unreduced.dtype
        return self.policy.reduce_dtype or own, parameter.local.dtype


class Reduction:
    """The gradients of one message in flight, from construction to `finish` or `drop`."""

    def __init__(self, unit: Unit, parameters: list[ShardedParameter], dtype: torch.dtype) -> None:
        mesh = unit.mesh
        self._unit = unit
        self._is_partial = unit.leaves_replicas
        self._message = unit.buffers.take(parameters, dtype, mesh.shard_group)
        gradients = [p.unreduced for p in parameters]
        self._message.fill(gradients)
        self._absent = {id(p) for p in parameters if p.unreduced is None and p.partial is None}
        for parameter in parameters:
            parameter.send()
        # By what sums are divided before, between and after the two stages.
        self._divisors = _divisors(dtype, mesh.reduce_sizes, unit.divide_factor)
        matrix = self._message.matrix
        if self._divisors[0] > 1:
            matrix.div_(self._divisors[0])
        self._message.mark(gradients)  # divided, the smallest numbers may be -0.0
        # The sum of this rank's row `[m]`, when the handle is done.
        if mesh.num_shards == 1 and mesh.replica_group is not None:  # nothing to scatter
            self._own, self._handle = matrix[0], comm.all_reduce_sum(matrix, mesh.replica_group)
        else:
            self._own, self._handle = comm.reduce_scatter_sum(matrix, mesh.shard_group)

    def finish(self) -> None:
        """Wait for the means and add them to the gradients of the shards."""
        parameters, mesh = self._message.parameters, self._unit.mesh
        with outside_of_autograd():
            self._handle.wait()
            # Not yet over replicas. A copy: the message's memory is used again.
            mean = self._own / self._divisors[1]
            if self._absent or mesh.replica_group is not None:  # which may have some absent
                self._message.keep_marks(self._own, mean)
            self._unit.buffers.give_back(self._message)
            if any(parameter.partial is not None for parameter in parameters):
                for parameter, rows in zip(parameters, self._rows(mean), strict=True):
                    if parameter.partial is not None:
                        rows += parameter.partial
            if not self._is_partial and mesh.reduce_sizes[1] > 1:
                comm.sum_over_ranks(mean, mesh.replica_group)
            # Before what may round a small negative number to -0.0.
            places = self._message.layout.places(mean[None])
            absent = [
                id(parameter) in self._absent and is_absent(place)
                for parameter, place in zip(parameters, places, strict=True)
            ]
            if not self._is_partial:
                if self._divisors[2] != 1:
                    mean.div_(self._divisors[2])
                mean = mean.to(parameters[0].local.dtype)
            is_cleared = [parameter.remove_placeholder() for parameter in parameters]
            for each in zip(parameters, self._rows(mean), is_cleared, absent, strict=True):
                self._hand_over(*each)

    def _hand_over(
        self, parameter: ShardedParameter, rows: torch.Tensor, is_cleared: bool, is_absent: bool
    ) -> None:
        if is_cleared:
            parameter.drop()
        elif is_absent:
            parameter.forget()
        elif self._is_partial:
            parameter.keep(rows)
        else:
            parameter.add(rows)

    def drop(self) -> None:
        """Wait, and discard the result."""
        self._handle.wait()
        self._unit.buffers.give_back(self._message)

    def _rows(self, row: torch.Tensor) -> list[torch.Tensor]:
        return self._message.layout.pieces(row)


def _divisors(
    dtype: torch.dtype, sizes: tuple[int, int], factor: float | None
) -> tuple[float, float, float]:
    # PyTorch's FSDP divides after each stage; doing the same gives the same bits. In float16 a sum
    # of W gradients would overflow where the mean does not: there the power of two that is at least
    # W goes first, which changes no bit of what neither overflows nor underflows.
    first, second = sizes
    if dtype is torch.float16:
        power = 2.0 ** (first * second - 1).bit_length()
        return power, 1.0, (factor or first * second) / power
    return (1.0, first, second) if factor is None else (1.0, 1.0, factor)


def _grouped(
    parameters: Iterable[ShardedParameter], key: Callable[[ShardedParameter], Any]
) -> list[tuple[Any, list[ShardedParameter]]]:
    groups: dict[Any, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return list(groups.items())


_watching: weakref.WeakSet[Unit] = weakref.WeakSet()  # whose `num_updates` is counted


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
