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
forwards run ahead on a CPU as well; after an exception nothing needs to be reset. What is left out
is refused by name, and listed in `solution/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from solution.parallel.fsdp import checks
from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.module import FSDPModule
from solution.parallel.fsdp.param import Place, ShardedParameter
from solution.parallel.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from solution.parallel.fsdp.schedule import Schedule
from solution.parallel.fsdp.unit import Unit

_Found = tuple[str, nn.Parameter, list[Place]]  # name, and where else it is registered
_CLASSES: dict[type, type] = {}  # a module's class to the one that it has once sharded
_AS_IT_IS = MixedPrecisionPolicy()
_WHERE_IT_IS = OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = _AS_IT_IS,
    offload_policy: OffloadPolicy = _WHERE_IT_IS,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
) -> Any:
    """Shard what is not sharded yet of `module`, in place; call it bottom-up.

    Values are not synchronised: seed all ranks alike. A module on the meta device stays there until
    `to_empty`. Parameters, buffers and the module's class keep their names; the class becomes a
    subclass of itself and of `FSDPModule`.

    Args:
        module: something with a forward of its own, or several that make one unit: gathered when
            the first of them runs, freed when all have, reduced when the first one's backward is
            over. They are inside of a module that is sharded later.
        mesh: 1-D: its ranks shard. 2-D (replicate, shard): its rows shard, and its columns
            average. None: all ranks shard.
        reshard_after_forward: True frees the full values after forward and gathers them again in
            backward. False keeps them. None is False for the outermost module and True for others.
            An int keeps the part of them that its group of so many neighbours needs to gather.
        shard_placement_fn: None, or says for each parameter None or `Shard(0)`: there is one way.
        mp_policy: dtypes; see `MixedPrecisionPolicy`. None is the default, too.
        offload_policy: there is only the one that keeps shards on the device that computes.
        ignored_params: stay as they are: neither sharded, nor moved, nor reduced.
        dp_mesh_dims: None: all dims of the mesh are data-parallel.

    Returns:
        `module`, which now is an `FSDPModule`, or a list of them.

    Raises:
        ValueError: a container without a forward, a module that is sharded already, a parameter
            that cannot be cut or is tied to another unit, a mesh without this rank, or ranks that
            disagree on the module.
        NotImplementedError: parameters that are not contiguous, or DTensors, or an option that is
            not offered.
    """
    modules = checks.as_modules(module)
    name = ", ".join(type(part).__name__ for part in modules)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    found = [entry for entry in _own_parameters(modules) if id(entry[1]) not in ignored]
    parameters = [parameter for _, parameter, _ in found]
    inside = [p for part in modules for p in part.parameters() if id(p) not in ignored]
    grid = Grid.of(mesh, device_type=checks.device_type(inside))
    policy = _AS_IT_IS if mp_policy is None else mp_policy

    def describe() -> list[str]:
        checks.require_offered(name, offload_policy, dp_mesh_dims)
        checks.require_options(name, reshard_after_forward, policy)
        for part in modules:
            checks.require_shardable(part, is_sharded=isinstance(part, FSDPModule))
        checks.require_one_device(name, inside)
        if type(reshard_after_forward) is int:
            grid.require_part(reshard_after_forward)
        lines = [f"parameters for {grid.mesh.device_type}"]
        lines.append(f"reshard_after_forward={reshard_after_forward}, {policy}")
        for where, parameter, _ in found:
            described = checks.described_as(name, where, parameter)
            checks.require_cuttable(described, parameter)
            checks.require_rows(described, shard_placement_fn and shard_placement_fn(parameter))
            lines.append(f"{described}, requires_grad={parameter.requires_grad}")
        return lines

    checks.require_same_on_all_ranks(grid, name, describe)
    _move([*parameters, *(b for part in modules for b in part.buffers())], grid.device)
    unit = Unit(
        modules,
        [ShardedParameter(where, parameter, places, grid) for where, parameter, places in found],
        grid,
        policy,
        reshard_after_forward=reshard_after_forward,
    )
    for parameter in parameters:
        parameter._fsdp_owner = name  # type: ignore[attr-defined]  # for ties
    for part in modules:
        _make_fsdp_module(part, unit)
    _schedule(modules)
    return module


# ------------------------------------------------------------------------------------ construction


def _make_fsdp_module(module: nn.Module, unit: Unit) -> None:
    original = type(module)
    if original not in _CLASSES:
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    module.__class__ = _CLASSES[original]
    # Not through nn.Module: a unit is no part of the model.
    object.__setattr__(module, "_fsdp_unit", unit)

    def show_shards(*_: object) -> None:
        unit.register_sharded()

    # A state dict holds shards, also between unshard() and reshard().
    module.register_state_dict_pre_hook(show_shards)
    module.register_load_state_dict_pre_hook(show_shards)


def _schedule(modules: Sequence[nn.Module]) -> None:
    """Put `modules` and all that is sharded inside of them under one schedule."""
    names: dict[Unit, list[str]] = {}  # outermost first
    sharded = []
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                names.setdefault(part._fsdp_unit, []).append(name or type(part).__mro__[2].__name__)
                sharded.append(part)
    for unit, found in names.items():
        unit.name = ", ".join(found)
    schedule = Schedule(sharded[0]._fsdp_unit, list(names))
    for part in sharded:
        object.__setattr__(part, "_fsdp_schedule", schedule)


def _own_parameters(modules: Sequence[nn.Module]) -> list[_Found]:
    """What no inner call has taken, each once with all its places; a child's before its parent's.

    The order is PyTorch's: at three ranks and more the last bits of a sum depend on where in a
    message it lies.
    """
    found: dict[int, _Found] = {}
    visited: set[nn.Module] = set()
    for module in modules:
        _visit(module, "", found, visited)
    return list(found.values())


def _visit(part: nn.Module, prefix: str, found: dict[int, _Found], visited: set[nn.Module]) -> None:
    # Not a function in a function: one that calls itself would keep the model until a collection.
    visited.add(part)
    for name, child in part.named_children():
        if child not in visited and not isinstance(child, FSDPModule):
            _visit(child, f"{prefix}{name}.", found, visited)
    for name, parameter in part._parameters.items():
        if parameter is not None:
            entry = found.setdefault(id(parameter), (f"{prefix}{name}", parameter, []))
            entry[2].append((part, name))


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Parameters and buffers to where this rank computes; what has no values yet stays."""
    for tensor in tensors:
        if not tensor.is_meta and tensor.device != device and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
