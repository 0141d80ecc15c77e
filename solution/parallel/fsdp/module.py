"""`FSDPModule`: the methods that `fully_shard` adds to a module, with PyTorch's names and defaults.

Setters that take `recurse` set every sharded module inside as well; the others set this one only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch import nn

from solution.parallel.fsdp.schedule import Schedule
from solution.parallel.fsdp.unit import Unit


class FSDPModule:
    """A base class of every module that `fully_shard` was called on."""

    _fsdp_unit: Unit
    _fsdp_schedule: Schedule

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object of the original class: slices of a sharded container are plain."""
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
        """All-gather this module's own unit; with `async_op` the handle or the forward waits."""
        self._fsdp_unit.drop_stale()
        self._fsdp_unit.unshard()
        handle = UnshardHandle(self._fsdp_unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's own unit; the next use gathers them."""
        self._fsdp_unit.reshard()

    def reset_iter_state(self) -> None:
        """Discard what an interrupted step has left.

        After an Exception the next forward does so by itself. After a KeyboardInterrupt in a
        forward this must be called, because module hooks do not run then.
        """
        self._fsdp_schedule.recover()

    # ------------------------------------------------------------------------------------ gathers

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after forwards, from the next one on.

        Raises:
            ValueError: not a bool; an int is an option of `fully_shard`.
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
        """Set whether backwards free unsharded parameters; if not, the next forward finds them."""
        for unit in _units_in(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backwards all-gather; only an Embedding's backward needs no weights.

        Raises:
            ValueError: a parameter of another class, whose backward would read freed memory.
        """
        unit = self._fsdp_unit
        places = [(p.name, type(module)) for p in unit.parameters for module, _ in p.places]
        for name, kind in [] if unshard_in_backward else places:
            if not any(base.__name__.endswith("Embedding") for base in kind.__mro__):
                raise ValueError(
                    f"expected a unit of Embeddings only, whose backward needs no weights, got "
                    f"{name!r} of {kind.__name__} in {unit.name}"
                )
        unit.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set which modules are prefetched in this one's forward, instead of the next one."""
        self._fsdp_unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set which modules are prefetched in this one's backward, instead of the previous one."""
        self._fsdp_unit.backward_prefetch = _units_of(modules)

    # ---------------------------------------------------------------------------------- gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backwards reduce; if not, unsharded gradients accumulate until one does."""
        for unit in _units_in(self, recurse):
            unit.reduces = unit.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards on an HSDP mesh also average over replicas.

        If not, sums over shards accumulate, as this rank's rows, until one does.
        """
        for unit in _units_in(self, recurse):
            unit.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether backwards end with all gradients in place; for the whole model.

        If not, the last reduction is in flight until the next backward, and overlaps with what
        comes between them. Gradients must not be read meanwhile.
        """
        self._fsdp_schedule.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what sums over ranks are divided by, instead of the number of ranks.

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
        """A context around the backward of a micro-batch: nothing is reduced."""
        previous = [(u, u.reduces, u.all_reduces) for u in _units_in(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces, all_reduces in previous:
                unit.reduces, unit.all_reduces = reduces, all_reduces


class UnshardHandle:
    """An `unshard(async_op=True)` in flight."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather; register the unsharded parameters, unless all is sharded."""
        self._unit.wait_for_unshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of `module` than `forward` compute with unsharded parameters.

    Without it such a method finds the shards. A module that is not sharded is not changed.

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
            args, kwargs = schedule.pre_forward(unit, module, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = schedule.post_forward(unit, module, args, output)
        return output

    setattr(module, method_name, like_forward)


def _units_in(module: FSDPModule, recurse: bool = True) -> list[Unit]:
    # No method, nor are the attributes without a prefix: the model may have its own of that name.
    inside: Iterable[object] = cast(nn.Module, module).modules() if recurse else [module]
    return [part._fsdp_unit for part in inside if isinstance(part, FSDPModule)]


def _units_of(modules: Sequence[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected modules that fully_shard was called on, got {type(module).__name__}"
            )
    return [module._fsdp_unit for module in modules]
