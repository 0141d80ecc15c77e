"""`fully_shard`: parameters, gradients and optimizer state divided over ranks, module by module.

Problem. With data parallelism every rank holds all parameters, gradients and optimizer state: 16
bytes per parameter for Adam in float32. Here each rank keeps 1/W of each, and a layer's parameters
are unsharded on a rank only while that layer computes.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                      # the rest: embedding, norm, head
    optimizer = AdamW(model.parameters())   # afterwards: it gets the shards
    loss(model(batch)).backward()           # gathers, and leaves this rank's part of the mean
    optimizer.step()

1. Every call makes one *unit* (FSDP2: parameter group) of the parameters that no earlier call has
   taken, so calls go bottom-up, and cuts each along dim 0, as `torch.chunk` does, into a DTensor
   (`param.py`).
2. A unit takes one all-gather and one reduce-scatter (`unit.py`, `message.py`).
3. Hooks of the modules and of autograd start both at the right moments (`schedule.py`).

`fsdp` shards the layers of a whole model in one call; everything else (norms) stays replicated,
being too small to be worth a message in forward, and its gradients are averaged after the backward
by the reducer of `ddp.py`.

Cost. Per step and rank, n bytes of parameters: all-gather n, all-gather n again
(`reshard_after_forward`), reduce-scatter n; data parallelism has 2n. Memory beside the shards:
about two units' values, and two units' gradients. The order of units and the size of messages
decide how much of it overlaps.

PyTorch counterpart: `torch.distributed.fsdp.fully_shard`, with the same names, defaults, layout of
messages and bits. `solution/README.md` lists all differences; what is left out is refused by name.
`fsdp` has no counterpart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem  # noqa: TID251  # the register of such APIs, and none of them
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from solution import comm
from solution.parallel.agreement import on_all_ranks
from solution.parallel.fsdp import options
from solution.parallel.fsdp.module import FSDPModule
from solution.parallel.fsdp.options import MixedPrecisionPolicy, OffloadPolicy, ShardingMesh
from solution.parallel.fsdp.param import Place, ShardedParameter
from solution.parallel.fsdp.schedule import Schedule
from solution.parallel.fsdp.unit import Unit
from solution.parallel.inventory import Inventory
from solution.parallel.reducer import Reducer

_Found = tuple[str, nn.Parameter, list[Place]]  # name, parameter, all its places
# A module's class to its subclass with FSDPModule.
_CLASSES: WeakValueDictionary[type, type] = WeakValueDictionary()
_NO_CASTS, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = _NO_CASTS,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
) -> Any:
    """Shard in place the parameters of `module` that are not sharded yet; call it bottom-up.

    Values are not synchronised: seed all ranks alike. A module on the meta device stays there until
    `to_empty`. Parameters, buffers and the module's class keep their names; the class becomes a
    subclass of itself and of `FSDPModule`.

    Args:
        module: a module with a forward, or several that make one unit: gathered when the first of
            them runs, freed when all have, reduced when the first one's backward is over. They are
            inside a module that is sharded later.
        mesh: 1-D: its ranks shard. 2-D (replicate, shard): its rows shard, and its columns
            average. None: all ranks shard.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them
            again in backward. False keeps them. None is False for the outermost module and True for
            others. An int keeps 1/int of them, so that the all-gather in backward stays within
            groups of so many neighbours: 1 is False, the number of ranks that shard is True.
        shard_placement_fn: None, or a function that returns None or `Shard(0)`.
        mp_policy: dtypes; see `MixedPrecisionPolicy`. None is the default, too.
        offload_policy: only `OffloadPolicy()`: shards stay on the device that computes.
        ignored_params: stay as they are: neither sharded, nor moved, nor reduced.
        dp_mesh_dims: None: all dims of the mesh are data-parallel.

    Returns:
        `module`, which now is an `FSDPModule`, or a list of them.

    Raises:
        ValueError: a container without a forward, a module that is sharded already, a parameter
            that cannot be cut or is tied to another unit, or ranks that disagree on the module: on
            all ranks, also if only one is wrong. A bad mesh, or a mesh without this rank: on this
            rank alone.
        NotImplementedError: parameters that are not contiguous, or DTensors, or an option that is
            not offered.
    """
    modules = options.as_modules(module)
    name = ", ".join(type(part).__name__ for part in modules)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    found = [entry for entry in _own_parameters(modules) if id(entry[1]) not in ignored]
    parameters = [parameter for _, parameter, _ in found]
    inside = [p for part in modules for p in part.parameters() if id(p) not in ignored]
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device_type = next((p.device.type for p in inside if not p.is_meta), default)
    sharding = ShardingMesh(mesh, device_type=device_type)
    policy = _NO_CASTS if mp_policy is None else mp_policy

    def describe() -> Iterator[str]:
        options.require_options(name, reshard_after_forward, policy, offload_policy, dp_mesh_dims)
        options.require_shardable(modules, inside, sharded_class=FSDPModule)
        if type(reshard_after_forward) is int:
            sharding.resharding(reshard_after_forward)
        yield f"parameters for {sharding.mesh.device_type}"
        yield f"reshard_after_forward={reshard_after_forward}, {policy}"
        for where, parameter, places in found:
            options.require_dense(places)
            described = options.described_rows(name, where, parameter, shard_placement_fn)
            yield f"{described}, requires_grad={parameter.requires_grad}"

    expected = f"all ranks to call fully_shard on {name} alike"
    on_all_ranks(describe, sharding.groups, expected=expected)
    if type(reshard_after_forward) is int:
        reshard_after_forward = sharding.resharding(reshard_after_forward)
    _move([*parameters, *(b for part in modules for b in part.buffers())], sharding.device)
    sharded = [ShardedParameter(*entry, sharding) for entry in found]
    inventory = Inventory(partial(_parts_of, modules))
    unit = Unit(modules, sharded, sharding, policy, reshard_after_forward, inventory)
    for parameter in parameters:
        parameter._fsdp_owner = name  # type: ignore[attr-defined]  # for ties
    for part in modules:
        _make_fsdp_module(part, unit)
    _schedule(modules)
    return module


# ------------------------------------------------------------------------------------ construction


def _make_fsdp_module(module: nn.Module, unit: Unit) -> None:
    original = type(module)
    sharded = _CLASSES.get(original)
    if sharded is None:
        sharded = _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    module.__class__ = sharded
    # The module's entry among PyTorch's composable APIs: `replicate` around it leaves it alone.
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    # Not through nn.Module: a unit is not a submodule.
    object.__setattr__(module, "_fsdp_unit", unit)

    def show_shards(*_: object) -> None:
        unit.register_sharded()

    # A state dict holds shards, also between unshard() and reshard().
    module.register_state_dict_pre_hook(show_shards)
    module.register_load_state_dict_pre_hook(show_shards)


def _schedule(modules: Sequence[nn.Module]) -> None:
    """Put `modules` and all sharded modules inside them under one schedule."""
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
    """Return the parameters that no inner call has taken, a child's before its parent's.

    The order is PyTorch's: at three ranks and more the last bits of a sum depend on its place in
    the message.
    """
    found: dict[int, _Found] = {}
    for prefix, part in _parts_of(modules):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                entry = found.setdefault(id(parameter), (f"{prefix}{name}", parameter, []))
                entry[2].append((part, name))
    return list(found.values())


def _parts_of(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    visited: set[nn.Module] = set()
    for module in modules:
        yield from _own_parts(module, "", visited)


def _own_parts(
    part: nn.Module, prefix: str, visited: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the prefix and the module of all parts that are not sharded yet, children first."""
    visited.add(part)
    if "replicate" not in getattr(part, REGISTRY_KEY, ()):
        for name, child in part.named_children():
            if child not in visited and not isinstance(child, FSDPModule):
                yield from _own_parts(child, f"{prefix}{name}.", visited)
        yield prefix, part


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move parameters and buffers to this rank's device; those on the meta device stay."""
    for tensor in tensors:
        if not tensor.is_meta and tensor.device != device and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


# ------------------------------------------------------------------------------------- whole model


class FullySharded(nn.Module):
    """A sharded model, an `FSDPModule`, with the interface of the data-parallel wrappers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        replicated = [p for p in module.named_parameters() if not isinstance(p[1], DTensor)]
        self._reducer = Reducer(replicated, None)
        unit, hooked = module._fsdp_unit, (p for _, p in replicated)
        unit.inventory = Inventory(partial(_parts_of, unit.modules), hooked)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        self._reducer.begin()
        # Replicated gradients are reduced in `finish`. In the backward, ranks with different unused
        # parameters would issue these collectives and the units' in different orders.
        self._reducer.is_armed = False
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context around forward and backward of a micro-batch: gradients stay local."""
        with self._reducer.no_sync(), self.module.no_sync():
            yield

    def finish_gradient_synchronization(self) -> None:
        """Wait for the means of replicated gradients; those of shards are in place already.

        Raises:
            RuntimeError: inside `no_sync`, or after an interrupted backward, whose gradients are
                dropped. Nothing is sent then, so peers whose backward went on wait for this rank.
        """
        if self.module._fsdp_schedule.was_interrupted:
            self.module.reset_iter_state()
            self._reducer.rearm()
            self.zero_grad()
            raise RuntimeError(
                f"rank {comm.rank(None)}: the backward before this call was interrupted by an "
                "exception, and its gradients are dropped; run the step again if that was so on "
                "all ranks, else end them, for the others wait for what this one did not send"
            )
        self._reducer.finish()


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> FullySharded:
    """Shard the Linear and Embedding layers of `module`, in place; the rest stays replicated.

    Returns a wrapper, whose `finish_gradient_synchronization` has to be called after each backward.

    Layers are recognised by the name of their class or of one of its bases, so also those that an
    exercise defines itself. Replicated as well are layers that share a parameter with a module of
    another kind, and those inside an `nn.MultiheadAttention`, which reads their weights without
    calling them. If something else does so, as in `x @ embedding.weight.T`, call `fully_shard` on a
    module around both. Values are not synchronised: seed all ranks alike. On a GPU build the
    optimizer with `foreach=False`: its default there takes no plain tensors beside DTensors.

    Args:
        compute_dtype: of the sharded layers in all-gathers and in computation. Shards, gradients,
            and whatever is replicated keep their own dtype.

    Raises:
        ValueError, NotImplementedError: see `fully_shard`.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    for layers in _layers(module):
        fully_shard(layers, mp_policy=policy)
    if not isinstance(module, FSDPModule):
        # A unit without parameters, which puts the others under one schedule.
        rest = {p for p in module.parameters() if not isinstance(p, DTensor)}
        fully_shard(module, ignored_params=rest)
    return FullySharded(module)


def _layers(module: nn.Module) -> list[list[nn.Module]]:
    """Return the layers to shard; layers that share a parameter make one unit."""
    read_from_outside = {
        part
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)
        for part in attention.modules()
    }
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, []).append(part)
    units: dict[nn.Module, list[nn.Module]] = {}
    for layer in module.modules():
        found = [part for p in layer.parameters() for part in users[p]]
        together = list(dict.fromkeys([layer, *found]))  # in one order on all ranks
        may_be_sharded = all(map(_is_layer, together)) and read_from_outside.isdisjoint(together)
        if found and layer not in units and may_be_sharded:
            units |= dict.fromkeys(together, together)
    return list({id(layers): layers for layers in units.values()}.values())


def _is_layer(module: nn.Module) -> bool:
    return any(base.__name__ in ("Linear", "Embedding") for base in type(module).__mro__)


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, unsharded, on every rank; all ranks call it.

    Keys are the names in the model without wrapper. Units that are unsharded are resharded first.
    """
    model = model.module if isinstance(model, FullySharded) else model
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
