"""When units are gathered, freed and reduced: the hooks of one model, and prefetching.

All of FSDP is one identity: forward is an all-gather, whose derivative is a reduce-scatter. For
each unit:

1. pre-forward      all-gather; prefetch the next unit
2. post-forward     free, unless the backward is to find the unsharded parameters
3. pre-backward     all-gather again; prefetch the previous unit
4. post-backward    free; finish the reduction of the unit before, start this one's
5. end of backward  finish the last reduction; reduce what no hook has reached

      forward    |gather 0|      f 0       |     f 1       |     f 2
                          |  gather 1  |   |  gather 2 |
      backward                  b 2        |      b 1      |     b 0     |
                          |  gather 1  |   | gather 0      |             |
                                           | reduce 2 |    | reduce 1 |  | reduce 0 |

The hooks. 1 and 2 are hooks of the module. 3 is a hook of the module's outputs, which knows the
unit whose forward came before, so the graph itself holds the order for prefetching. 4 is the
backward of an identity on the module's inputs: it runs when the gradients of all of them are
there, after those of the parameters, which autograd accumulates first. A unit whose inputs need no
gradient has no such moment and is reduced in 5. A forward prefetches what came next in the last
forward; once it takes another way, it prefetches nothing more. `torch.compile` is kept out of all
of them (`_disable_dynamo`): graphs break where a unit begins, and hold its unsharded Parameters as
inputs.

One message of each kind is in flight at a time. So, beside the shards and what the outermost unit
keeps, there are at most the unsharded values of the unit that computes, its unsharded gradients,
the values that come next (more where prefetch lists ask for it), and the gradients that have just
left. A backward that finds its values kept, and frees them, has room for a second message of
gradients: small ones spend more time waiting than travelling.

Invariants. Outside of forward and backward, `parameters()` are the shards, but between `unshard()`
and `reshard()`. What was gathered before an update that shows (`unit.py`) is never used after it.
An Exception leaves the model with its shards; after one in a backward the next pass of this rank,
forward or backward, discards what that backward left behind. If only some ranks raised, collectives
no longer match: end the run. (`recover` is for the rest: module hooks do not run after a
KeyboardInterrupt.)

Paper: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
sections 3.2 and 3.3; Rajbhandari et al. 2020, "ZeRO", section 5. PyTorch counterpart: `FSDPState`,
whose forward prefetch is left to CUDA streams, so that on a CPU nothing overlaps.
"""

import copy
import dataclasses
import operator
import weakref
from collections import UserDict, UserList
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from solution.parallel.fsdp.message import BufferPool, outside_of_autograd
from solution.parallel.fsdp.unit import Reduction, Unit, UnitState
from solution.parallel.reducer import is_inside_backward


class Schedule:
    """The hooks and the shared state of the units of one model; `root` is the outermost unit."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.root = root
        self.units = units  # outermost first
        self.is_last_backward = True  # whether backwards finish the reductions they have started
        self.buffers = BufferPool()
        self._reductions: list[list[Reduction]] = []  # in flight, by unit
        self._outermost: Unit | None = None  # whose forward is running
        self._latest: Unit | None = None  # whose forward has ended last
        self._order: list[Unit] = []  # in which forwards began, in this pass
        self._previous_order: list[Unit] = []  # in the pass before
        self._prefetched: list[Unit] = []
        # From a backward's first unit to its end; see `_queue_end`.
        self._queued_end: weakref.ref[Any] | None = None
        for unit in units:
            self._take_over(unit)

    def _take_over(self, unit: Unit) -> None:
        # Only the schedule of the outermost module that was sharded last is in force.
        unit.reshard()
        unit.buffers = self.buffers
        for handle in unit.hooks:
            handle.remove()
        before, after = partial(self.pre_forward, unit), partial(self.post_forward, unit)
        unit.hooks = []
        for module in unit.modules:
            unit.hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]

    # ----------------------------------------------------------------------------------- forward

    @torch._disable_dynamo
    def pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """All-gather, and prefetch what comes next; return the inputs, cast and with hooks."""
        unit.depth += 1
        # Activation checkpointing repeats forwards inside a backward; these are not new passes.
        is_new = not is_inside_backward()
        is_first = not unit.to_run
        if is_new and is_first and torch.is_grad_enabled():
            unit.inventory.require_nothing_new(unit.name)
        if is_new and self._outermost is None:
            self._begin_pass(unit)
        with outside_of_autograd():
            if not unit.is_in_backward:
                unit.drop_stale()
            if is_first:
                unit.was_kept = unit.state is UnitState.UNSHARDED
                unit.first_node = torch.autograd._get_sequence_nr()
            unit.unshard()
            unit.wait_for_unshard()
            if is_new and is_first:
                unit.to_run.update(unit.modules)
                self._order.append(unit)
                for other in unit.forward_prefetch or self._expected_next():
                    other.drop_stale()
                    self._prefetch(other)
        args, kwargs = _cast((args, kwargs), unit.policy.input_dtype)
        if not is_first:
            return args, kwargs
        # The first module to run is the last in backward: then the whole unit is done.
        hook = partial(self._post_backward, unit)
        watched: tuple[Any, Any] = _watched(hook, (args, kwargs), _differentiable((args, kwargs)))
        return watched

    @torch._disable_dynamo
    def post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        """Free; also called after an exception, with None for the output."""
        is_new = not is_inside_backward()
        unit.depth = max(0, unit.depth - 1)  # a hook of the user's may have raised before ours
        hook = partial(self._pre_backward, unit, self._latest if is_new else None)
        outputs = _differentiable(output)
        if any(tensor.is_leaf for tensor in outputs):  # a Parameter: a hook would stay with it
            output = _map_tensors(lambda t: t.view_as(t), output)
            outputs = _differentiable(output)
        for tensor in outputs:
            _call_before(hook, tensor, unit.first_node)
        if torch.is_grad_enabled() and torch._C._are_functorch_transforms_active():
            # What a transform of torch.func hides may belong to a graph outside of it.
            hidden = [t for t in _tensors(output) if t.is_floating_point() and not t.requires_grad]
            output, outputs = _watched(hook, output, hidden), [*outputs, *hidden]
        if is_new and not unit.depth:
            unit.register_sharded()
            is_outermost = self._outermost is unit
            unit.to_run.discard(module)
            if not unit.to_run or is_outermost:
                self._leave(unit, has_backward=bool(outputs))
            if is_outermost:
                self._end_pass()
        return _cast(output, unit.policy.output_dtype)

    def _leave(self, unit: Unit, *, has_backward: bool) -> None:
        """Free a unit all of whose modules have run, or will not run."""
        unit.to_run.clear()
        if has_backward:
            self._latest = unit
        # Without a backward, nothing is kept that was not kept before.
        if not (self._keeps(unit) and (has_backward or unit.was_kept)):
            kind = type(unit.reshard_after_forward)
            unit.reshard(keep_part=has_backward and kind is int)

    def _begin_pass(self, unit: Unit) -> None:
        if self._queued_end is not None:
            self.recover()
        self._outermost, self._latest = unit, None
        self._previous_order, self._order = self._order, []

    def _end_pass(self) -> None:
        self._outermost = None
        for unit in self.units:
            if unit.to_run:
                self._leave(unit, has_backward=torch.is_grad_enabled())
        self._drop_unused()

    def _keeps(self, unit: Unit) -> bool:
        """Whether the unsharded parameters are kept for the backward."""
        if unit.reshard_after_forward is None:
            return unit is self.root
        return not unit.reshard_after_forward

    def _expected_next(self) -> Iterable[Unit]:
        position = len(self._order)
        if self._order == self._previous_order[:position]:
            return self._previous_order[position : position + 1]
        return ()

    def _prefetch(self, unit: Unit) -> None:
        if unit.state in (UnitState.SHARDED, UnitState.PARTLY_SHARDED):
            unit.unshard()
            self._prefetched.append(unit)

    def _drop_unused(self) -> None:
        """Free what was prefetched and not used, and the buffers."""
        for unit in self._prefetched:
            if unit.state is UnitState.GATHERING:
                unit.reshard()
        self._prefetched.clear()
        self.buffers.empty()

    # ---------------------------------------------------------------------------------- backward

    @torch._disable_dynamo
    def _pre_backward(self, unit: Unit, previous: Unit | None, *_: torch.Tensor) -> None:
        if self.was_interrupted:
            self.recover()
        if self._queued_end is None:
            self._finish_reductions()  # of a backward that was not the last
            self._queue_end()
        is_new, unit.is_in_backward = not unit.is_in_backward, True
        if unit.unshards_in_backward:
            unit.unshard()
            unit.wait_for_unshard()
        if is_new:
            for parameter in unit.parameters:
                parameter.drop_if_cleared()
                parameter.resume()
        chosen = [previous] if previous is not None else []
        for other in unit.backward_prefetch or chosen:
            if other.unshards_in_backward:
                self._prefetch(other)

    def _post_backward(self, unit: Unit, *_: torch.Tensor) -> None:
        is_called, unit.is_in_backward = unit.is_in_backward, False
        unit.register_sharded()
        if unit.reshard_after_backward:
            unit.reshard()
        if any(p.is_in_flight and (is_called or p.has_local_gradient) for p in unit.parameters):
            self._finish_reductions()  # its modules ran twice: the first reduction goes before this
        unit.take_gradients()
        # What was called is reduced, whether or not this rank has used any of its parameters.
        if unit.sends and unit.has_something_to_send(is_called=is_called):
            # Parameters kept for this backward and freed in it leave room for a second message.
            makes_room = self._keeps(unit) and unit.reshard_after_backward
            self._finish_reductions(but=1 if makes_room else 0)
            self._reductions.append(unit.start_reduction())

    def _finish_reductions(self, *, but: int = 0) -> None:
        """Finish the oldest units first; leave those of the latest `but` units in flight."""
        while len(self._reductions) > but:
            for reduction in self._reductions.pop(0):
                reduction.finish()

    @property
    def was_interrupted(self) -> bool:
        """Whether a backward has raised, and `recover` was not called since."""
        return self._queued_end is not None and self._queued_end() is None

    def _queue_end(self) -> None:
        # Autograd alone holds `end`: it calls it if this backward succeeds, and frees it anyway. So
        # the reference is dead after an interrupted backward.
        end = partial(self._end_of_backward)
        self._queued_end = weakref.ref(end, self._backward_is_over)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _backward_is_over(self, end: object) -> None:
        if self._queued_end is end:  # it was interrupted
            for unit in self.units:
                unit.register_sharded()

    @torch._disable_dynamo
    def _end_of_backward(self) -> None:
        for unit in self.units:
            if not unit.is_in_backward:
                for parameter in unit.parameters:
                    parameter.drop_if_cleared()
            if unit.is_in_backward or unit.state is not UnitState.SHARDED or unit.has_gradients:
                self._post_backward(unit)
        if self.is_last_backward:
            self._finish_reductions()
        for parameter in chain.from_iterable(unit.parameters for unit in self.units):
            parameter.leave_placeholder()
        self._drop_unused()
        self._queued_end = None

    def recover(self) -> None:
        """After an interrupted pass: wait for all messages, and discard what arrived."""
        self._queued_end = None
        self._outermost = None
        for reduction in chain(*self._reductions):
            reduction.drop()
        self._reductions.clear()
        for unit in self.units:
            unit.is_in_backward = False
            unit.depth = 0
            unit.to_run.clear()
            unit.reshard()
            for parameter in unit.parameters:
                parameter.drop()
        self._drop_unused()


def _call_before(hook: Callable[..., None], output: torch.Tensor, first_node: int) -> None:
    """Call `hook` when a backward reaches an output.

    Where a view is written to later, the graph keeps the node of its base alone. So that node is
    watched as well, if the forward has made it: its nodes are numbered from `first_node` on.
    """
    output.register_hook(hook)
    base = None if torch._C._are_functorch_transforms_active() else output._base
    node = None if base is None else base.grad_fn
    if node is not None and node._sequence_nr() >= first_node:
        node.register_prehook(hook)


class _Watched(torch.autograd.Function):
    """The identity; its backward calls `hook`, also where a transform of `torch.func` takes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: Callable[..., None], *tensors: torch.Tensor) -> Any:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.hook()
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, _hook: None, *tangents: torch.Tensor) -> Any:
        return tangents


def _watched(hook: Callable[..., None], values: Any, chosen: list[torch.Tensor]) -> Any:
    """Return `values`, the backward of whose `chosen` tensors calls `hook` once."""
    if not chosen:
        return values
    watched = _Watched.apply(hook, *chosen)  # type: ignore[no-untyped-call]  # torch's
    passed = dict(zip(map(id, chosen), watched, strict=True))
    return _map_tensors(lambda t: passed.get(id(t), t), values)


# --------------------------------------------------------------------- tensors in containers


def _map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor], values: Any, around: tuple[int, ...] = ()
) -> Any:
    """Replace tensors in containers and dataclasses; what holds none stays the same object.

    Args:
        around: ids of what `values` is in, so that what holds itself comes to an end.
    """
    if isinstance(values, torch.Tensor):
        return change(values)
    if type(values) is tuple:  # the usual case; PyTorch's walk takes longer than a small layer
        found = tuple(_map_tensors(change, value, around) for value in values)
        return found if any(a is not b for a, b in zip(found, values, strict=True)) else values
    if type(values) is dict and not values:
        return values
    leaves, structure = tree_flatten(values)
    if structure.is_leaf():
        return _map_unknown(change, values, around)
    changed = [_map_tensors(change, leaf, around) for leaf in leaves]
    is_same = all(a is b for a, b in zip(changed, leaves, strict=True))
    return values if is_same else tree_unflatten(changed, structure)


def _map_unknown(
    change: Callable[[torch.Tensor], torch.Tensor], values: Any, around: tuple[int, ...]
) -> Any:
    """As `_map_tensors`, of dataclasses and of dicts and lists of a class that PyTorch has not met.

    Changed is a copy: to make one anew would call the class's own code a second time.
    """
    if isinstance(values, type | nn.Module) or id(values) in around:
        return values
    parts: list[tuple[Callable[[Any, Any, Any], None], list[tuple[Any, Any]]]] = []
    if dataclasses.is_dataclass(values):
        names = [field.name for field in dataclasses.fields(values) if hasattr(values, field.name)]
        parts.append((object.__setattr__, [(name, getattr(values, name)) for name in names]))
    if isinstance(values, dict | UserDict):
        parts.append((operator.setitem, list(values.items())))
    elif isinstance(values, list | UserList):
        parts.append((operator.setitem, list(enumerate(values))))
    changed = values
    for put, items in parts:
        for key, value in items:
            new = _map_tensors(change, value, (*around, id(values)))
            if new is not value:
                changed = _copied(values) if changed is values else changed
                put(changed, key, new)
    return changed


def _copied(values: Any) -> Any:
    copied = copy.copy(values)
    if getattr(values, "__dict__", None) is values:  # a dict whose keys are its attributes
        copied.__dict__ = copied
    return copied


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in containers and dataclasses."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(note, values)
    return found


def _differentiable(values: Any) -> list[torch.Tensor]:
    """Return the tensors in `values` that a backward reaches."""
    return [t for t in _tensors(values) if t.requires_grad] if torch.is_grad_enabled() else []


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors to `dtype`, unless it is None."""
    if dtype is None:
        return values
    return _map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)
