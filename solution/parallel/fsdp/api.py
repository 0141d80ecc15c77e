"""`fully_shard`: parameters, gradients and optimizer state divided over ranks, module by module.

Problem. With data parallelism every rank holds all parameters, gradients and optimizer state: 16
bytes per parameter for Adam in float32. Here each rank keeps 1/W of each, and a layer's parameters
are whole on a rank only while that layer computes.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                      # what is left: embedding, norm, head
    optimizer = AdamW(model.parameters())   # afterwards: it gets the shards

1. Every call makes one *unit* of the parameters that no earlier call has taken, so calls go
   bottom-up, and cuts each along dim 0, as `torch.chunk` does, into a DTensor (`param.py`).
2. A unit is gathered in one message and reduced in one (`unit.py`).
3. Hooks of the modules and of autograd do so at the right moments, ahead of time (`schedule.py`).

Cost. Per step and rank, n bytes of parameters: gather n, gather n again (`reshard_after_forward`),
reduce n; data parallelism has 2n. Memory beside the shards: about two units' values, and two units'
gradients. Only the order of units and the size of messages decide how much of it overlaps.

PyTorch counterpart: `torch.distributed.fsdp.fully_shard`, with the same names, defaults, layout of
messages and bits. Where it differs: a copy of the weights is never used after an update;
`zero_grad` discards pending gradients too; parameters are the shards whenever no module computes;
forwards run ahead on a CPU as well; after an exception nothing needs to be reset. Left out: CPU
offload, other dims, several modules in one unit, DTensors as parameters, setters that tune NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from solution.parallel.fsdp import checks
from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.param import Place, ShardedParameter
from solution.parallel.fsdp.policy import MixedPrecisionPolicy
from solution.parallel.fsdp.schedule import Schedule
from solution.parallel.fsdp.unit import Unit

_CLASSES: dict[type, type] = {}  # a module's class to the one that it has once sharded


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> FSDPModule:
    """Shard what is not sharded yet of `module`, in place; call it bottom-up.

    Values are not synchronised: seed all ranks alike. A module on the meta device stays there until
    `to_empty`. Parameters, buffers and the module's class keep their names; the class becomes a
    subclass of itself and of `FSDPModule`.

    Args:
        module: something with a forward of its own.
        mesh: 1-D: its ranks shard. 2-D (replicate, shard): its rows shard, and its columns
            average. None: all ranks shard.
        reshard_after_forward: True frees the full values after forward and gathers them again in
            backward. False keeps them. None is False for the outermost module and True for others.
            An int keeps the part of them that its group of so many neighbours needs to gather.
        mp_policy: dtypes; see `MixedPrecisionPolicy`.
        ignored_params: stay as they are: neither sharded, nor moved, nor reduced.

    Returns:
        The module.

    Raises:
        ValueError: a container without a forward, a module that is sharded already, a parameter
            that cannot be cut or is tied to another unit, a mesh without this rank, or ranks that
            disagree on the module.
        NotImplementedError: parameters that are not contiguous, or DTensors.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    checks.require_module(module)
    grid = Grid.of(mesh, device_type=checks.device_type(module))
    ignored = ignored_params or set()
    found = [entry for entry in _own_parameters(module) if entry[1] not in ignored]

    def describe() -> list[str]:
        is_sharded = isinstance(module, FSDPModule)
        checks.require_shardable(module, reshard_after_forward, policy, is_sharded=is_sharded)
        if type(reshard_after_forward) is int:
            grid.require_part(reshard_after_forward)
        lines = [f"reshard_after_forward={reshard_after_forward}, {policy}"]
        for name, parameter, _ in found:
            checks.require_cuttable(module, name, parameter)
            described = checks.described_as(module, name, parameter)
            lines.append(f"{described}, requires_grad={parameter.requires_grad}")
        return lines

    checks.require_same_on_all_ranks(grid, type(module).__name__, describe)
    _move(module, grid.device, ignored)
    unit = Unit(
        module,
        [ShardedParameter(name, parameter, places, grid) for name, parameter, places in found],
        grid,
        policy,
        reshard_after_forward=reshard_after_forward,
    )
    for _, parameter, _ in found:
        parameter._fsdp_owner = type(module).__name__  # type: ignore[attr-defined]  # for ties
    _make_fsdp_module(module, unit)
    _schedule(module)
    return cast(FSDPModule, module)


class FSDPModule:
    """What a sharded module can do besides what its own class can."""

    _unit: Unit

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
        self._unit.drop_outdated()
        self._unit.start_gather()
        handle = UnshardHandle(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full values of this module's own unit; the next use gathers them."""
        self._unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce; where not, gradients add up, in full, until one does."""
        for unit in self._units(recurse):
            unit.reduces = requires_gradient_sync

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full values are freed after forwards, from the next one on."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full values are freed after backwards; if not, micro-batches share a gather."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers start in this one's forward, instead of the next one's."""
        self._unit.prefetch_in_forward = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers start in this one's backward, instead of the previous one's."""
        self._unit.prefetch_in_backward = _units_of(modules)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of a micro-batch: nothing is reduced."""
        previous = [(unit, unit.reduces) for unit in self._units(recurse=True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces in previous:
                unit.reduces = reduces

    def _units(self, recurse: bool) -> list[Unit]:
        modules: Iterable[nn.Module] = cast(nn.Module, self).modules() if recurse else ()
        return [m._unit for m in modules if isinstance(m, FSDPModule)] if recurse else [self._unit]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of `module` beside `forward` compute with full values too.

    Without it such a method finds the shards. A module that is not sharded is left alone.

    Raises:
        ValueError: there is no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"expected {type(module).__name__} to have a method {method_name!r}, got {method!r}"
        )
    if not isinstance(module, FSDPModule):
        return
    unit = module._unit

    def like_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.before_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = unit.after_forward(module, args, output)
        return output

    setattr(module, method_name, like_forward)


class UnshardHandle:
    """An `unshard(async_op=True)` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Let the module's parameters be the full values."""
        self._unit.finish_gather()


# ------------------------------------------------------------------------------------ construction


def _make_fsdp_module(module: nn.Module, unit: Unit) -> None:
    original = type(module)
    if original not in _CLASSES:
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    module.__class__ = _CLASSES[original]
    # Not through nn.Module: a unit is no part of the model.
    object.__setattr__(module, "_unit", unit)

    def show_shards(*_: object) -> None:
        unit.register_sharded()

    # A state dict holds shards, also between unshard() and reshard().
    module.register_state_dict_pre_hook(show_shards)
    module.register_load_state_dict_pre_hook(show_shards)


def _schedule(module: nn.Module) -> None:
    """Put `module` and all that is sharded inside of it under one schedule."""
    units = []
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part._unit.name = name or type(module).__name__
            units.append(part._unit)
    Schedule(units[0], units)


def _units_of(modules: Sequence[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected modules that fully_shard was called on, got {type(module).__name__}"
            )
    return [module._unit for module in modules]


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, list[Place]]]:
    """What no inner call has taken, each once with all its places; a child's before its parent's.

    The order is PyTorch's: at three ranks and more the last bits of a sum depend on where in a
    message it lies.
    """
    found: dict[int, tuple[str, nn.Parameter, list[Place]]] = {}
    visited: set[nn.Module] = set()

    def visit(part: nn.Module, prefix: str) -> None:
        visited.add(part)
        for name, child in part.named_children():
            if child not in visited and not isinstance(child, FSDPModule):
                visit(child, f"{prefix}{name}.")
        for name, parameter in part._parameters.items():
            if parameter is not None:
                entry = found.setdefault(id(parameter), (f"{prefix}{name}", parameter, []))
                entry[2].append((part, name))

    visit(module, "")
    return list(found.values())


def _move(module: nn.Module, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Parameters and buffers to where this rank computes; what has no values yet stays."""
    kept = {id(parameter) for parameter in ignored}
    for tensor in (*module.parameters(), *module.buffers()):
        stays = tensor.is_meta or id(tensor) in kept or isinstance(tensor, DTensor)
        if not stays and tensor.device != device:
            tensor.data = tensor.data.to(device)
