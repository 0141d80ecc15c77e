"""What a tensor is on this rank: replicated or sharded, its name, its ties, a hash of its bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
VIEWS = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
_MIX = -7046029254386353131  # an odd number with well-spread bits: neighbours get unlike weights


@dataclass(frozen=True)
class Entry:
    """A parameter of an optimizer.

    Attributes:
        kind: "ddp" (replicated by DistributedDataParallel), "plain" (no wrapper is known),
            "sharded" (a DTensor of an FSDP unit), "tensor" (another DTensor), "flat" (of FSDP1),
            "local" (the wrapper leaves it alone).
        ranks: those of its group or mesh; empty where unknown.
        shard: which part this rank has, equal on ranks that hold the same part.
        is_held: whether a module that was called has it.
        is_added: whether a model has it that was wrapped without it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    ranks: tuple[int, ...]
    shard: tuple[int, ...]
    is_held: bool
    is_trained: bool
    is_added: bool = False


class Names:
    """Names, wrappers and ties of the parameters of all modules that were called at the top."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.ddp: dict[int, tuple[tuple[int, ...], weakref.ref[Any]]] = {}
        self.fsdp: set[int] = set()
        self.units: set[int] = set()  # modules whose parameters FSDP2 shards
        self._known: set[int] = set()
        self._wrappers: list[weakref.ref[Any]] = []
        self._wrapper: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.ignored: set[int] = set()
        self.added: set[int] = set()
        self.flat: dict[int, tuple[int, ...]] = {}
        self.trainable: dict[int, weakref.ref[Tensor]] = {}
        self.shards: dict[tuple[int, str], tuple[str, weakref.ref[Tensor]]] = {}
        self._registered: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        self._ties: list[list[tuple[weakref.ref[nn.Module], str]]] = []

    def register_module(self, owner: nn.Module) -> None:
        """Remember a DistributedDataParallel: a script may call the module inside it."""
        if isinstance(owner, nn.parallel.DistributedDataParallel):
            self._wrappers.append(weakref.ref(owner))

    def register(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """Remember who registered a parameter: two places for one are a tie."""
        if parameter is not None:
            places = self._registered.setdefault(id(parameter), [])
            if not places:
                weakref.finalize(parameter, self._registered.pop, id(parameter), None)
            places.append((weakref.ref(module), name))
            if len(places) == 2:  # once, whatever comes later
                self._ties.append(places)

    def learn(self, root: nn.Module) -> None:
        """Read names and wrappers of a module that is called at the top."""
        for ref in self._wrappers:
            wrapper = ref()
            group = getattr(wrapper, "process_group", None)
            if wrapper is not None and group in dist.distributed_c10d._world.pg_group_ranks:
                self._learn_ddp(wrapper)  # not one of a world that was destroyed
        for name, module in root.named_modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self._wrapper[root] = weakref.ref(module)
            elif type(module).__name__ == "FullyShardedDataParallel":
                inner: Any = module.process_group
                ranks = tuple(dist.get_process_group_ranks(inner))
                self.flat |= {id(p): ranks for p in module.parameters()}
            if any(each.__name__ == "FSDPModule" for each in type(module).__mro__):
                self.fsdp |= {id(p) for p in module.parameters()}
            self._learn_parameters(module, plain_name(name))
        labels = {id(module): plain_name(name) for name, module in root.named_modules()}
        for module in root.modules():
            self._learn_shards(module, labels)

    def _learn_parameters(self, module: nn.Module, label: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = ".".join(filter(None, (label, name)))
            self._know(parameter)
            self.of.setdefault(id(parameter), full)
            if parameter.requires_grad:
                self.trainable[id(parameter)] = weakref.ref(parameter)
            if is_dtensor(parameter):
                self.shards[id(module), name] = (full, weakref.ref(parameter))

    def _learn_shards(self, module: nn.Module, labels: dict[int, str]) -> None:
        """Read the shards of a unit whose full weights are in place, as `unshard()` leaves them."""
        units = unit_parameters(module)
        if _is_unit(module):  # a DTensor, or full weights that are in place
            known = {id(getattr(own, "_unsharded_param", None)) for own in units}
            self.added |= {id(p) for p in module.parameters() if not is_dtensor(p)} - known
        for own in units:
            self.units.add(id(own._module_info.module))
            owner, name = own._module_info.module, own._module_info.param_name
            shard = own.sharded_param
            self.fsdp.add(id(shard))
            if id(owner) in labels and (id(owner), name) not in self.shards:
                full = ".".join(filter(None, (labels[id(owner)], name)))
                self._know(shard)
                self.of.setdefault(id(shard), full)
                self.trainable[id(shard)] = weakref.ref(shard)
                self.shards[id(owner), name] = (full, weakref.ref(shard))

    def talks(self, root: nn.Module) -> bool:
        """Whether the forward of a module communicates by a wrapper or a layer that is known."""
        known = ("FSDPModule", "FullyShardedDataParallel", "SyncBatchNorm")
        return any(each.__name__ in known for m in root.modules() for each in type(m).__mro__)

    def _know(self, parameter: Tensor) -> None:
        """Forget what is known of a parameter when it goes: another may get its id."""
        if id(parameter) not in self._known:
            self._known.add(id(parameter))
            weakref.finalize(parameter, self._forget, id(parameter))

    def _forget(self, key: int) -> None:
        for known in (self.of, self.ddp, self.flat, self.trainable):
            known.pop(key, None)  # type: ignore[attr-defined]
        self.ignored.discard(key)
        self.added.discard(key)
        self.fsdp.discard(key)
        self._known.discard(key)

    def _learn_ddp(self, module: nn.parallel.DistributedDataParallel) -> None:
        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        ignored = getattr(module, "parameters_to_ignore", ())
        own = getattr(module, "_module_parameters", None)
        for name, parameter in module.module.named_parameters():
            self._know(parameter)
            if own is not None and not any(parameter is each for each in own):
                self.added.add(id(parameter))
            self.ddp[id(parameter)] = (ranks, weakref.ref(module))
            if name in ignored:
                self.ignored.add(id(parameter))

    def wrapper(self, root: nn.Module) -> Any:
        """Return the DistributedDataParallel that a root is or has, if any."""
        found = self._wrapper.get(root)
        if found:
            return found()
        active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        return active if getattr(active, "module", None) is root else None  # of `ddp.forward()`

    def tell_apart(self, labelled: Iterable[tuple[str, Tensor]]) -> None:
        """Rename parameters of an optimizer whose models call them alike, by their places in it."""
        taken = set()
        for label, parameter in labelled:
            name = self.of.get(id(parameter))
            if name is not None and name in taken:
                self.of[id(parameter)] = f"{name} ({label})"
            taken.add(name)

    def entry(self, parameter: Tensor, label: str) -> Entry:
        """Describe a parameter of an optimizer; `label` is its name where no module has it."""
        key = id(parameter)
        kind = "plain"
        ranks: tuple[int, ...] = ()
        shard: tuple[int, ...] = ()
        if is_dtensor(parameter):
            kind, ranks, shard = _of_mesh(parameter)
            kind = kind if key in self.fsdp else "tensor"
        elif key in self.flat:
            kind, ranks = "flat", self.flat[key]
        elif key in self.ignored:
            kind = "local"
        elif key in self.ddp:
            kind, ranks = "ddp", self.ddp[key][0]
        name = self.of.get(key, label)
        return Entry(
            name,
            tuple(parameter.shape),
            kind,
            ranks,
            shard,
            key in self.of,
            parameter.requires_grad,
            key in self.added and kind in ("plain", "ddp"),
        )

    @property
    def has_ties(self) -> bool:
        """Whether two places ever held one parameter."""
        return bool(self._ties)

    def broken_ties(self) -> list[tuple[str, str]]:
        """Return pairs of places that shared a parameter at first and no longer do."""
        found = []
        for places in self._ties:
            alive = [(module, name) for ref, name in places if (module := ref()) is not None]
            now = [(m, n, p) for m, n in alive if (p := m._parameters.get(n)) is not None]
            names = [self.of.get(id(p), n) for _, n, p in now]
            if len({id(p) for _, _, p in now}) > 1 and all(id(p) in self.of for _, _, p in now):
                found.append((names[0], names[-1]))
        return found


def plain_name(name: str) -> str:
    """Return a dotted name without what wrappers put into it.

    >>> plain_name("module._orig_mod.head.weight")
    'head.weight'
    """
    dotted = f"{name}."
    for prefix in PREFIXES:
        dotted = dotted.removeprefix(prefix).replace(f".{prefix}", ".")
    while dotted.startswith(PREFIXES):
        dotted = dotted.partition(".")[2]
    return dotted[:-1]


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without importing that module."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without any communication."""
    detached: Any = tensor.detach()
    return detached._local_tensor if is_dtensor(detached) else detached


def full_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the full weights that a module, about to compute, and its children have.

    Children, since some modules use a child's weights without calling it (`MultiheadAttention`).
    """
    for owner in (module, *module.children()):
        for name, parameter in owner._parameters.items():
            if parameter is None or is_dtensor(parameter):
                continue
            if parameter.untyped_storage().nbytes() or not parameter.numel():
                yield owner, name, parameter


def unit_parameters(module: nn.Module) -> list[Any]:
    """Return what `fully_shard` keeps of each parameter of a unit."""
    if not _is_unit(module):
        return []
    unit: Any = module
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [each for group in groups if group is not None for each in group.fsdp_params]


def _is_unit(module: nn.Module) -> bool:
    kinds = (each.__module__ for each in type(module).__mro__ if each.__name__ == "FSDPModule")
    return any(kind.startswith("torch.") for kind in kinds)


def _of_mesh(parameter: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    mesh, placements = parameter.device_mesh, parameter.placements
    at = mesh.get_coordinate() or [-1] * mesh.ndim
    shard = tuple(c for c, p in zip(at, placements, strict=True) if not p.is_replicate())
    return "sharded", tuple(mesh.mesh.flatten().tolist()), shard


def own_part(full: Tensor, shard: Any) -> Tensor | None:
    """Return the part of a full tensor that a DTensor holds here; None where it is not plain."""
    dims = [(d, p) for d, p in enumerate(shard.placements) if not p.is_replicate()]
    if len(dims) != 1 or type(dims[0][1]).__name__ != "Shard" or full.shape != shard.shape:
        return None
    mesh_dim, placement = dims[0]
    at = shard.device_mesh.get_coordinate()
    parts = torch.chunk(full, shard.device_mesh.size(mesh_dim), dim=placement.dim)
    index = at[mesh_dim] if at is not None else len(parts)
    return parts[index] if index < len(parts) else None


def fingerprint(tensor: Tensor, *, is_mixed: bool = False) -> Tensor:
    """Return a 0-d int64 hash of a tensor's bytes, on its device, without waiting for it.

    Args:
        is_mixed: weigh each place, for small integers, whose plain sums collide.
    """
    if tensor.layout is torch.sparse_coo:
        dense = tensor.coalesce()
        return fingerprint(dense.values()) + fingerprint(dense.indices(), is_mixed=True)
    local = local_of(tensor)
    if not local.untyped_storage().nbytes():  # freed: a full weight that is gathered when needed
        return torch.zeros((), dtype=torch.int64, device=local.device)
    flat = (local if local.is_contiguous() else local.contiguous()).view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    for dtype, width in VIEWS:
        if flat.numel() * size % width == 0 and flat.storage_offset() * size % width == 0:
            words = flat.view(torch.uint8).view(dtype) if flat.numel() else flat.to(torch.int64)
            break
    if not is_mixed:
        return words.sum(dtype=torch.int64)
    return ((words.to(torch.int64) + 1) * mixed_places(words.numel(), words.device)).sum()


def mixed_places(size: int, device: torch.device) -> Tensor:
    """Return a weight for each place, so that equal numbers in other places have another sum."""
    mixed = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _MIX
    return mixed ^ (mixed >> 29)
