"""When units are gathered, freed and reduced: the hooks of one model, and what runs ahead.

The whole of FSDP is one identity: forward is a gather, and its derivative is a reduce-scatter. What
makes it work is when. For each unit:

1. before its forward    gather; the next unit's gather starts
2. after its forward     free, unless the backward is to find the full values
3. before its backward   gather again; the previous unit's gather starts
4. after its backward    free; the reduction of the one before is finished, its own starts
5. end of backward       finish the last reduction; reduce what no hook has reached

      forward    |gather 0|      f 0       |     f 1       |     f 2
                          |  gather 1  |   |  gather 2 |
      backward                  b 2        |      b 1      |     b 0     |
                          |  gather 1  |   | gather 0      |             |
                                           | reduce 2 |    | reduce 1 |  | reduce 0 |

How the hooks are reached. 1 and 2 are hooks of the module. 3 hangs on the module's outputs, and
knows which unit's forward came before, so the graph itself carries the order for prefetching. 4 is
the backward of an identity on the module's inputs: it runs when the gradients of all of them are
there, after those of the parameters. A unit whose inputs need no gradient has no such moment; 5
takes care of it. In forward what comes next is what came next the last time; a forward that goes
another way is not prefetched from there on.

One message of each kind is under way at a time, and so, beside the shards, there are at most the
full values of the unit that computes, its full gradients, the values that come next, and the
gradients that have just left. Where a backward finds its values kept, and gives them back, a second
message of gradients takes their room: small ones spend more time waiting than travelling.

Invariants. Between steps, and outside of forward and backward, `parameters()` are the shards. What
was gathered before an update is never used after it. An Exception in a forward leaves the model
sharded; after one in a backward the next forward drops what that backward left behind, on whatever
ranks it happened. (`recover` is for the rest: module hooks do not run after a KeyboardInterrupt.)

Paper: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
sections 3.2 and 3.3; Rajbhandari et al. 2020, "ZeRO", section 5. PyTorch counterpart: `FSDPState`,
whose forward prefetch is left to CUDA streams, so that on a CPU nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from solution.parallel.fsdp import nested
from solution.parallel.fsdp.message import Buffers, outside_of_autograd
from solution.parallel.fsdp.reduction import Reduction
from solution.parallel.fsdp.unit import State, Unit


class Schedule:
    """What the units of one model share.

    Attributes:
        root: the outermost unit.
        units: all of them, outermost first.
        is_last_backward: whether backwards finish what they have started to reduce.
    """

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.root = root
        self.units = units
        self.is_last_backward = True
        self.buffers = Buffers()
        self._reductions: list[list[Reduction]] = []  # under way, by unit
        self._outermost: Unit | None = None  # whose forward is running
        self._latest: Unit | None = None  # whose forward has ended last
        self._order: list[Unit] = []  # in which forwards began, in this pass
        self._previous_order: list[Unit] = []  # in the pass before
        self._ahead: list[Unit] = []  # whose gathers were started ahead of their use
        self._is_end_queued = False  # from a backward's first unit to its end
        for unit in units:
            self._take_over(unit)

    def _take_over(self, unit: Unit) -> None:
        # A unit obeys one schedule: that of the outermost module that was sharded last.
        unit.reshard()
        unit.buffers = self.buffers
        for handle in unit.hooks:
            handle.remove()
        before, after = partial(self.before_forward, unit), partial(self.after_forward, unit)
        unit.hooks = []
        for module in unit.modules:
            unit.hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]

    # ----------------------------------------------------------------------------------- forward

    def before_forward(
        self, unit: Unit, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Gather, and start what comes next; gives the inputs to compute with."""
        # Activation checkpointing runs forwards again inside of a backward: no pass of their own.
        unit.depth += 1
        is_new = not _is_inside_backward()
        is_first = not unit.to_run
        if is_new and self._outermost is None:
            self._begin_pass(unit)
        with outside_of_autograd():
            if not unit.is_in_backward:
                unit.drop_outdated()
            if is_first:
                unit.was_kept = unit.state is State.FULL
            unit.start_gather()
            unit.finish_gather()
            if is_new and is_first:
                unit.to_run.update(unit.modules)
                self._order.append(unit)
                for other in unit.prefetch_in_forward or self._expected_next():
                    other.drop_outdated()
                    self._start_ahead(other)
        args, kwargs = nested.cast((args, kwargs), unit.policy.input_dtype)
        # In backward the first module to run is the last: when it is done, all of the unit is.
        return self._watch_inputs(unit, args, kwargs) if is_first else (args, kwargs)

    def after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        """Free; also after an exception, with None for the output."""
        is_new = not _is_inside_backward()
        unit.depth = max(0, unit.depth - 1)  # a hook of the user's may have raised before ours
        outputs = nested.differentiable(output) if torch.is_grad_enabled() else []
        for tensor in outputs:
            previous = self._latest if is_new else None
            tensor.register_hook(partial(self._before_backward, unit, previous))
        if is_new and not unit.depth:
            unit.register_sharded()
            is_outermost = self._outermost is unit
            unit.to_run.discard(module)
            if not unit.to_run or is_outermost:
                self._leave(unit, has_backward=bool(outputs))
            if is_outermost:
                self._end_pass()
        return nested.cast(output, unit.policy.output_dtype)

    def _leave(self, unit: Unit, *, has_backward: bool) -> None:
        """All of its modules have run, or no more of them will."""
        unit.to_run.clear()
        self._latest = unit
        # Without a backward to come nothing is kept that was not kept before.
        if not (self._keeps(unit) and (has_backward or unit.was_kept)):
            kind = type(unit.reshard_after_forward)
            unit.reshard(keep_part=has_backward and kind is int)

    def _begin_pass(self, unit: Unit) -> None:
        if self._is_end_queued:
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
        """Whether the full values wait for the backward."""
        if unit.reshard_after_forward is None:
            return unit is self.root
        return not unit.reshard_after_forward

    def _expected_next(self) -> Iterable[Unit]:
        position = len(self._order)
        if self._order == self._previous_order[:position]:
            return self._previous_order[position : position + 1]
        return ()

    def _start_ahead(self, unit: Unit) -> None:
        if unit.state is State.SHARDED:
            unit.start_gather()
            self._ahead.append(unit)

    def _drop_unused(self) -> None:
        """What was gathered ahead, and not used after all; and all buffers."""
        for unit in self._ahead:
            if unit.state is State.GATHERING:
                unit.reshard()
        self._ahead.clear()
        self.buffers.empty()

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inputs = nested.differentiable((args, kwargs)) if torch.is_grad_enabled() else []
        if not inputs:
            return args, kwargs
        watched = _AfterBackward.apply(self, unit, *inputs)  # type: ignore[no-untyped-call]  # torch's
        passed = iter(watched)
        return nested.map_tensors(lambda t: next(passed) if t.requires_grad else t, (args, kwargs))

    # ---------------------------------------------------------------------------------- backward

    def _before_backward(self, unit: Unit, previous: Unit | None, gradient: torch.Tensor) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            self._finish_reductions()  # of a backward that was not the last
            # Runs when this backward has succeeded; an interrupted one leaves the flag up.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        is_new, unit.is_in_backward = not unit.is_in_backward, True
        if unit.unshards_in_backward:
            unit.start_gather()
            unit.finish_gather()
        if is_new:
            for parameter in unit.parameters:
                parameter.drop_cleared()
                parameter.resume_gradient()
        chosen = [previous] if previous is not None else []
        for other in unit.prefetch_in_backward or chosen:
            if other.unshards_in_backward:
                self._start_ahead(other)

    def _after_backward(self, unit: Unit) -> None:
        unit.is_in_backward = False
        unit.take_gradients()
        unit.register_sharded()
        if unit.reshard_after_backward:
            unit.reshard()
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not unit.sends:
            for parameter in unit.parameters:
                parameter.hold_pending()
            return
        if any(parameter.pending is not None for parameter in unit.parameters):
            # What was kept for this backward, and is given back in it, makes room for a second.
            makes_room = self._keeps(unit) and unit.reshard_after_backward
            self._finish_reductions(but=1 if makes_room else 0)
            self._reductions.append(unit.start_reduction())

    def _finish_reductions(self, *, but: int = 0) -> None:
        """Of the oldest units first; those of the latest `but` units stay under way."""
        while len(self._reductions) > but:
            for reduction in self._reductions.pop(0):
                reduction.finish()

    def _end_of_backward(self) -> None:
        for unit in self.units:
            if not unit.is_in_backward:
                for parameter in unit.parameters:
                    parameter.drop_cleared()
            if unit.is_in_backward or unit.state is not State.SHARDED or unit.has_gradients:
                self._after_backward(unit)
        if self.is_last_backward:
            self._finish_reductions()
        for reduction in chain(*self._reductions):
            reduction.let_be_cleared()
        self._drop_unused()
        self._is_end_queued = False

    def recover(self) -> None:
        """After an interrupted backward: peers get their messages, what came is dropped."""
        self._is_end_queued = False
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
                parameter.drop_pending()
        self._drop_unused()


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs when the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, unit: Unit, *inputs: torch.Tensor) -> Any:
        ctx.schedule, ctx.unit = schedule, unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.schedule._after_backward(ctx.unit)
        return None, None, *gradients


def _is_inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
