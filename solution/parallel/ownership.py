"""The owner of each parameter, and the memory from which owners send new values.

Problem. When each parameter is updated by one rank only, all ranks must agree on that rank, nobody
should own much more than the others, and new values should travel in few messages without copies.

1. `deal`: the largest parameter first, each to the rank that has the fewest bytes so far.
   Parameters that train come before frozen ones, which have no state. The largest share then
   exceeds the mean share by less than the largest parameter (Graham 1969, "Bounds on
   Multiprocessing Timing Anomalies": longest processing time first). Sizes and order alone decide,
   so nothing is sent, and a parameter keeps its owner.
2. Once, the parameters of each owner move into a *slab*: a flat buffer, whose pieces become the
   `.data` of the very Parameter objects. Modules, gradients and hooks notice nothing.
3. `exchange`: one asynchronous broadcast per slab from its owner, all in flight at once: on gloo
   several times as fast as an all-gather.

Invariants. Pieces begin where allocations of their own could (64 bytes), so kernels compute the
same bits as before. A parameter that has got other memory since (`model.to`, `assign=True`), or
that begins to train, is found by its address, and slabs are laid out anew with the values found.

Cost. One copy of the parameters that train per exchange; no memory beside the parameters, but one
slab while it is being laid out.

PyTorch counterpart: the same greedy partition, and `parameters_as_bucket_view=True`, of
`ZeroRedundancyOptimizer`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution import comm, flat

OptimizerGroup = dict[str, Any]  # a parameter group of an optimizer


@dataclass(frozen=True)
class _Slab:
    """The parameters of one owner, dtype and device, one after another."""

    owner: int
    memory: torch.Tensor  # 1-D
    parameters: list[torch.Tensor]


class Ownership:
    """Which rank of `group` owns which parameter."""

    def __init__(self, group: comm.Group) -> None:
        self.owners: dict[torch.Tensor, int] = {}  # in the order in which they were dealt
        self._group = group
        self._slabs: list[_Slab] = []
        self._addresses: dict[torch.Tensor, int] = {}  # of the parameters in slabs
        self._frozen: list[torch.Tensor] = []  # not in slabs

    def deal(self, groups: Sequence[OptimizerGroup]) -> None:
        """Give every parameter of `groups` an owner.

        Raises:
            ValueError: a parameter that cannot be sent in place of another; none was dealt then.
        """
        named = {p: name for group in groups for p, name in _named(group)}
        _require_plain(named, self.owners)
        load_bytes = [0] * comm.size(self._group)
        for parameter, owner in self.owners.items():
            load_bytes[owner] += parameter.nbytes
        for parameter in sorted(named, key=lambda p: (not p.requires_grad, -p.nbytes)):
            self.owners[parameter] = owner = load_bytes.index(min(load_bytes))
            load_bytes[owner] += parameter.nbytes

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo `deal` for these parameters."""
        for parameter in parameters:
            self.owners.pop(parameter, None)

    def is_mine(self, parameter: torch.Tensor) -> bool:
        """Whether this rank owns `parameter`."""
        return self.owners.get(parameter) == comm.rank(self._group)

    def own_part(self, group: OptimizerGroup) -> OptimizerGroup:
        """Return the group with this rank's parameters only."""
        return {**options(group), "params": [p for p in group["params"] if self.is_mine(p)]}

    @torch._disable_dynamo  # a compiled step is the local optimizer's
    @torch.no_grad()
    def exchange(self) -> None:
        """Return when every parameter that trains has its owner's value, on every rank."""
        if comm.size(self._group) == 1:
            return
        if not self._is_laid_out():
            self._lay_out()
        handles = [comm.broadcast(slab.memory, slab.owner, self._group) for slab in self._slabs]
        for handle in handles:
            handle.wait()
        # A graph from before the exchange is refused on every rank, not on the owner's alone.
        for slab in self._slabs:
            if slab.owner != comm.rank(self._group):
                torch.autograd.graph.increment_version(slab.parameters)

    def _is_laid_out(self) -> bool:
        return (
            len(self._addresses) + len(self._frozen) == len(self.owners)
            and all(p.data_ptr() == address for p, address in self._addresses.items())
            and not any(map(_can_change, self._frozen))
        )

    def _lay_out(self) -> None:
        shares: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._frozen = []
        for parameter, owner in self.owners.items():
            # A parameter that was in a slab stays in one: its memory is a part of it.
            if _can_change(parameter) or parameter in self._addresses:
                kind = (owner, parameter.dtype, parameter.device)
                shares.setdefault(kind, []).append(parameter)
            else:
                self._frozen.append(parameter)
        self._slabs, self._addresses = [], {}
        for (owner, dtype, device), parameters in shares.items():
            offsets, end = flat.aligned_offsets(parameters)
            memory = torch.zeros(end, dtype=dtype, device=device)
            self._slabs.append(_Slab(owner, memory, parameters))
            for parameter, offset in zip(parameters, offsets, strict=True):
                place = memory.as_strided(parameter.shape, flat.strides_for(parameter), offset)
                parameter.data = place.copy_(parameter)
                self._addresses[parameter] = place.data_ptr()


def options(group: OptimizerGroup) -> OptimizerGroup:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def described(groups: Sequence[OptimizerGroup]) -> Iterator[str]:
    """Yield a line for each group and parameter, equal on ranks that fit together."""
    for number, group in enumerate(groups):
        plain = {
            key: value
            for key, value in sorted(options(group).items())
            if isinstance(value, bool | int | float | str | tuple)
        }
        yield f"group {number} with {plain}"
        for parameter, name in _named(group):
            yield (
                f"{name} of group {number}: {parameter.dtype} {tuple(parameter.shape)}, "
                f"requires_grad={parameter.requires_grad}"
            )


def _named(group: OptimizerGroup) -> list[tuple[torch.Tensor, str]]:
    """Return each parameter with its name, or its number in the group if it has none."""
    names = group.get("param_names") or range(len(group["params"]))
    return [(p, f"parameter {name!r}") for name, p in zip(names, group["params"], strict=True)]


def _can_change(parameter: torch.Tensor) -> bool:
    # Optimizers update whatever has a gradient, and a frozen parameter may be given one by hand.
    return parameter.requires_grad or parameter.grad is not None


def _require_plain(named: Mapping[torch.Tensor, str], others: Iterable[torch.Tensor]) -> None:
    addresses = {p.data_ptr() for p in others if p.numel()}
    for parameter, where in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {where} to have values, got none; materialise it first")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"expected {where} to be a plain tensor, got a DTensor; what is sharded already "
                "has sharded state with the plain optimizer"
            )
        if parameter.layout != torch.strided:
            raise ValueError(f"expected {where} to be dense, got {parameter.layout}")
        if parameter.numel() and parameter.data_ptr() in addresses:
            raise ValueError(
                f"expected {where} to have memory of its own, got that of another parameter; to "
                "tie them use one Parameter in both places"
            )
        addresses.add(parameter.data_ptr())
