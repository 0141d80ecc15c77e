"""`FSDPModule`: what a sharded module can do besides what its own class can.

Names, parameters and defaults are PyTorch's. Setters that say `recurse` set every sharded module
inside as well; the others set this one only.

PyTorch counterpart: `FSDPModule` in `_fully_shard.py`. `solution/README.md` lists what is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch import nn

from solution.parallel.fsdp import checks
from solution.parallel.fsdp.schedule import Schedule
from solution.parallel.fsdp.unit import Unit


class FSDPModule:
    """A module that `fully_shard` was called on; its class is made of this one and its own."""

    _fsdp_unit: Unit
    _fsdp_schedule: Schedule

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: a slice of a sharded container is a plain container."""
        original: Any = cls.__mro__[2]
        self = original.__new__(original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]  # an object of another class
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(
            f"expected no deepcopy of {type(self).__name__}, whose hooks and shards belong to one "
            "model; build it again and load its state_dict"
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit; with `async_op` the handle or the forward waits."""
        self._fsdp_unit.drop_outdated()
        self._fsdp_unit.start_gather()
        handle = UnshardHandle(self._fsdp_unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full values of this module's own unit; the next use gathers them."""
        self._fsdp_unit.reshard()

    def reset_iter_state(self) -> None:
        """Forget a step that was interrupted.

        After an exception the next forward does so by itself. After what is none to `except
        Exception`, a KeyboardInterrupt in a forward, only this does: hooks do not see it.
        """
        self._fsdp_schedule.recover()

    # ------------------------------------------------------------------------------------ gathers

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full values are freed after forwards, from the next one on.

        Raises:
            ValueError: no bool; parts are asked for when sharding.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"expected reshard_after_forward of {self._fsdp_unit.name} to be a bool, got "
                f"{reshard_after_forward!r}; an int is for fully_shard"
            )
        for unit in _units_in(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full values are freed after backwards; if not, micro-batches share a gather."""
        for unit in _units_in(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backwards gather; an Embedding's needs no weights, so it can do without.

        Raises:
            ValueError: some parameter is of another class: its backward would read freed memory.
        """
        if not unshard_in_backward:
            checks.require_embeddings(self._fsdp_unit)
        self._fsdp_unit.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers start in this one's forward, instead of the next one's."""
        self._fsdp_unit.prefetch_in_forward = units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers start in this one's backward, instead of the previous one's."""
        self._fsdp_unit.prefetch_in_backward = units_of(modules)

    # ---------------------------------------------------------------------------------- gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce; where not, gradients add up, in full, until one does."""
        for unit in _units_in(self, recurse):
            unit.reduces = unit.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards on a 2-D mesh also average over replicas.

        Where not, what was added up over shards waits, as this rank's rows, until one does.
        """
        for unit in _units_in(self, recurse):
            unit.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends with all gradients in place; for the whole model.

        Where not, its last reduction is finished by the next backward, and overlaps with what comes
        between them: nobody may read gradients there.
        """
        self._fsdp_schedule.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """By what sums over ranks are divided, instead of their number.

        Raises:
            ValueError: not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise ValueError(
                f"expected the divide factor of {self._fsdp_unit.name} to be a positive number, "
                f"got {factor!r}"
            )
        self._fsdp_unit.divide_factor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # as PyTorch called it once

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of a micro-batch: nothing is reduced."""
        previous = [(u, u.reduces, u.all_reduces) for u in _units_in(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces, all_reduces in previous:
                unit.reduces, unit.all_reduces = reduces, all_reduces


class UnshardHandle:
    """An `unshard(async_op=True)` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Let the module's parameters be the full values."""
        self._unit.finish_gather()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of `module` beside `forward` compute with full values too.

    Without it such a method finds the shards. A module that is not sharded is left alone.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"expected {module._fsdp_unit.name} to have a method {method_name!r}, got {method!r}"
        )

    @functools.wraps(method)
    def like_forward(*args: Any, **kwargs: Any) -> Any:
        unit, schedule = module._fsdp_unit, module._fsdp_schedule
        if unit.depth:  # called by the module itself, which is not done with its values
            return method(*args, **kwargs)
        output = None
        try:
            args, kwargs = schedule.before_forward(unit, module, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = schedule.after_forward(unit, module, args, output)
        return output

    setattr(module, method_name, like_forward)


def _units_in(module: FSDPModule, recurse: bool = True) -> list[Unit]:
    # No method, nor are the attributes without a prefix: the model may have its own of that name.
    inside: Iterable[object] = cast(nn.Module, module).modules() if recurse else [module]
    return [part._fsdp_unit for part in inside if isinstance(part, FSDPModule)]


def units_of(modules: Sequence[FSDPModule]) -> list[Unit]:
    """The units of sharded modules.

    Raises:
        ValueError: one is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected modules that fully_shard was called on, got {type(module).__name__}"
            )
    return [module._fsdp_unit for module in modules]
