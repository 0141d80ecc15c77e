"""What a tensor is on this rank: its name, wrapper, part and ties; its hash and its norm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
VIEWS = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
_WIDE = (torch.float64, torch.float32)
_FLOATS = (*_WIDE, torch.bfloat16, torch.float16)
_MIX = -7046029254386353131  # an odd number with well-spread bits: neighbours get unlike weights
_LEAVES_ALONE = {"post_localSGD_hook", "noop_hook"}
"""Communication hooks of PyTorch's that leave gradients unreduced: ranks are meant to differ."""


@dataclass(frozen=True)
class Entry:
    """A parameter of an optimizer.

    Attributes:
        kind: "ddp" (replicated by DistributedDataParallel), "plain" (no wrapper is known),
            "sharded" (a DTensor of an FSDP unit), "tensor" (another DTensor), "flat" (of FSDP1),
            "local" (the wrapper leaves it alone).
        ranks: those of its group or mesh; empty where unknown.
        shard: which part this rank has, equal on ranks that hold the same part.
        number: which one of the rank's parameters it is, in the order in which they were met.
        is_held: whether a module that was called has it.
        is_added: whether a model has it that was wrapped without it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    ranks: tuple[int, ...]
    shard: tuple[int, ...]
    number: int
    is_held: bool
    is_trained: bool
    is_added: bool = False


@dataclass
class Known:
    """What is known of one parameter while it lives.

    Attributes:
        name: in a module that was called at the top, or "".
        owner: the module that has it, if that is called at the top, or within.
        kind, ranks: as of an `Entry`, of a parameter that is no DTensor.
        wrapper: the DistributedDataParallel that has it, or had it while that lived.
        is_fsdp: whether a unit of FSDP2 has it.
        is_counted: whether the backwards that reach it are counted.
        places: the modules that it was registered in, each with the name there; two are a tie.
    """

    parameter: weakref.ref[Tensor]
    number: int
    name: str = ""
    owner: Callable[[], nn.Module | None] = lambda: None
    kind: str = "plain"
    ranks: tuple[int, ...] = ()
    wrapper: weakref.ref[Any] | None = None
    is_fsdp: bool = False
    is_added: bool = False
    is_counted: bool = False
    places: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)

    @property
    def ddp(self) -> Any:
        """The DistributedDataParallel that has it, while that lives."""
        return None if self.wrapper is None else self.wrapper()


class Names:
    """Names, wrappers and ties of the parameters of all modules that were called at the top."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.count = 0  # of names that were given
        self.units: set[int] = set()  # modules whose parameters FSDP2 shards
        self._full: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP2's own records of these
        self.shards: dict[tuple[int, str], tuple[str, weakref.ref[Tensor]]] = {}
        self.met = 0  # parameters so far
        self._wrappers: list[weakref.ref[Any]] = []
        self._wrapper: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._ties: list[list[tuple[weakref.ref[nn.Module], str]]] = []

    def of(self, parameter: Tensor) -> Known:
        """Return what is known of a parameter; it is forgotten when the parameter goes."""
        known = self.known.get(id(parameter))
        if known is None:
            known = self.known[id(parameter)] = Known(weakref.ref(parameter), self.met)
            self.met += 1
            weakref.finalize(parameter, self.known.pop, id(parameter), None)
        return known

    def register_module(self, owner: nn.Module) -> None:
        """Remember a DistributedDataParallel: a script may call the module inside it."""
        if isinstance(owner, nn.parallel.DistributedDataParallel):
            self._wrappers.append(weakref.ref(owner))

    def register(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """Remember who registered a parameter: two places for one are a tie."""
        if parameter is not None:
            places = self.of(parameter).places
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
        labels = {id(module): plain_name(name) for name, module in root.named_modules()}
        for module in root.modules():
            self._learn_wrapper(root, module)
            for name, own in module._parameters.items():
                if own is not None:
                    self._name(module, labels, name, own, is_shard=is_dtensor(own))
        for module in root.modules():
            self._learn_shards(module, labels)

    def _learn_wrapper(self, root: nn.Module, module: nn.Module) -> None:
        kinds = [each.__name__ for each in type(module).__mro__]
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._wrapper[root] = weakref.ref(module)
        for parameter in module.parameters() if "FSDPModule" in kinds else ():
            self.of(parameter).is_fsdp = True
        if kinds[0] == "FullyShardedDataParallel":
            inner: Any = module.process_group
            for parameter in module.parameters():
                known = self.of(parameter)
                known.kind, known.ranks = "flat", tuple(dist.get_process_group_ranks(inner))

    def _name(
        self, owner: nn.Module, labels: dict[int, str], name: str, of: Tensor, *, is_shard: bool
    ) -> None:
        full = ".".join(filter(None, (labels[id(owner)], name)))
        known = self.of(of)
        self.count += not known.name
        known.name, known.owner = known.name or full, weakref.ref(owner)
        if is_shard:
            self.shards[id(owner), name] = (full, weakref.ref(of))

    def _learn_shards(self, module: nn.Module, labels: dict[int, str]) -> None:
        """Read the shards of a unit whose full weights are in place, as `unshard()` leaves them."""
        kinds = (k.__module__ for k in type(module).__mro__ if k.__name__ == "FSDPModule")
        if not any(kind.startswith("torch.") for kind in kinds):
            return
        unit: Any = module
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        units = [each for group in groups if group is not None for each in group.fsdp_params]
        whole = {id(getattr(own, "_unsharded_param", None)) for own in units}
        for parameter in module.parameters():  # a DTensor, or full weights that are in place
            if not is_dtensor(parameter) and id(parameter) not in whole:
                self.of(parameter).is_added = True
        for own in units:
            owner, name = own._module_info.module, own._module_info.param_name
            self.units.add(id(owner))
            self._full.add(own)
            self.of(own.sharded_param).is_fsdp = True
            if id(owner) in labels and (id(owner), name) not in self.shards:
                self._name(owner, labels, name, own.sharded_param, is_shard=True)

    def unreduced(self, ids: set[int]) -> list[str]:
        """Return the names of shards whose gradients FSDP2 has accumulated, and not reduced."""
        full = [(own, getattr(own, "_unsharded_param", None)) for own in self._full]
        grads = [(of.sharded_param, of.unsharded_accumulated_grad, p) for of, p in full]
        kept = [of for of, g, p in grads if (g if p is None or p.grad is None else p) is not None]
        return sorted(self.of(shard).name for shard in kept if id(shard) in ids)

    def talks(self, root: nn.Module) -> bool:
        """Whether the forward of a module communicates by a wrapper or a layer that is known."""
        known = ("FSDPModule", "FullyShardedDataParallel", "SyncBatchNorm")
        return any(each.__name__ in known for m in root.modules() for each in type(m).__mro__)

    def _learn_ddp(self, module: nn.parallel.DistributedDataParallel) -> None:
        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        ignored = getattr(module, "parameters_to_ignore", ())
        own = getattr(module, "_module_parameters", None)
        hooks = [hook for hook, _ in getattr(module, "_comm_hooks", ())]
        cells = [cell for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
        for cell in cells:  # as a wrapper that compresses has
            with suppress(ValueError):  # of a name that is not assigned yet
                hooks.append(cell.cell_contents)
        is_local = not _LEAVES_ALONE.isdisjoint(getattr(hook, "__name__", "") for hook in hooks)
        for name, parameter in module.module.named_parameters():
            known = self.of(parameter)
            known.is_added |= own is not None and not any(parameter is each for each in own)
            known.wrapper = weakref.ref(module)
            if name in ignored or known.kind == "local" or is_local:
                known.kind = "local"
            else:
                known.kind, known.ranks = "ddp", ranks

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
            known = self.of(parameter)
            name = known.name
            if name and name in taken:
                known.name = f"{name} ({label})"
            taken.add(name)

    def entry(self, parameter: Tensor, label: str) -> Entry:
        """Describe a parameter of an optimizer; `label` is its name where no module has it."""
        known = self.of(parameter)
        kind, ranks = known.kind, known.ranks
        shard: tuple[int, ...] = ()
        if is_dtensor(parameter):
            kind = "sharded" if known.is_fsdp else "tensor"
            ranks, shard = _of_mesh(parameter)
        return Entry(
            known.name or label,
            tuple(parameter.shape),
            kind,
            ranks,
            shard,
            known.number,
            bool(known.name),
            parameter.requires_grad,
            known.is_added and kind in ("plain", "ddp"),
        )

    def broken_ties(self) -> list[tuple[str, str]]:
        """Return pairs of places that shared a parameter at first and no longer do."""
        found = []
        for places in self._ties:
            alive = [(module, name) for ref, name in places if (module := ref()) is not None]
            now = [p for module, name in alive if (p := module._parameters.get(name)) is not None]
            names = [self.of(p).name for p in now]
            if len({id(p) for p in now}) > 1 and all(names):
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


def _of_mesh(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    mesh, placements = parameter.device_mesh, parameter.placements
    at = mesh.get_coordinate() or [-1] * mesh.ndim
    shard = tuple(c for c, p in zip(at, placements, strict=True) if not p.is_replicate())
    return tuple(mesh.mesh.flatten().tolist()), shard


def part_of(parameter: Any) -> tuple[int, int, int] | None:
    """Return the dim that a DTensor is sharded along, the number of parts, and its own."""
    at = parameter.device_mesh.get_coordinate() if is_dtensor(parameter) else None
    if at is not None:
        for mesh_dim, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                return placement.dim, parameter.device_mesh.size(mesh_dim), at[mesh_dim]
    return None


def own_part(full: Tensor, shard: Any) -> Tensor | None:
    """Return the part of a full tensor that a DTensor holds here; None where it is not plain."""
    kinds = [type(p).__name__ for p in shard.placements if not p.is_replicate()]
    part = part_of(shard) if kinds == ["Shard"] and full.shape == shard.shape else None
    return None if part is None else cut(full, part)


def cut(full: Tensor, part: tuple[int, int, int] | None) -> Tensor:
    """Return a part, as `part_of` gives it, of a full tensor; all of it where that is None."""
    if part is None:
        return full
    dim, parts, index = part
    pieces = full.chunk(parts, dim=dim)
    return pieces[index] if index < len(pieces) else full.narrow(dim, 0, 0)


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


def norms_of(tensors: list[Tensor | None]) -> list[float]:
    """Return the norm of each tensor's part on this rank, 0 of one that has no number."""
    found = [0.0] * len(tensors)
    parts = [(place, local) for place, t in enumerate(tensors) if (local := _part(t)) is not None]
    for is_wide in (True, False):
        own = [(place, part) for place, part in parts if (part.dtype in _WIDE) is is_wide]
        if own:
            dtype = None if is_wide else torch.float32
            values = torch._foreach_norm([part for _, part in own], 2, dtype=dtype)
            together = torch.stack([v.double().to(values[0].device) for v in values]).tolist()
            for (place, _), value in zip(own, together, strict=True):
                found[place] = value
    return found


def not_finite(entries: list[Entry], tensors: list[Tensor | None], known: list[float]) -> list[str]:
    """Return the names of tensors that are not finite, given their norms.

    The sum of squares may be infinite where no number is.
    """
    doubted = [index for index, value in enumerate(known) if not math.isfinite(value)]
    parts = [(index, _part(tensors[index])) for index in doubted]
    return [entries[i].name for i, p in parts if p is not None and not p.isfinite().all()]


def _part(tensor: Tensor | None) -> Tensor | None:
    local = None if tensor is None else local_of(tensor)
    if local is not None and local.layout is torch.sparse_coo:
        local = local._values()
    if local is None or local.dtype not in _FLOATS or not local.numel():
        return None
    return local if local.untyped_storage().nbytes() else None  # freed: gathered when needed
