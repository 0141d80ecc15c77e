"""Slabs: every rank's parameters in one stretch of memory, so that sending them needs no copies.

Problem. After a sharded step each rank has new values of its own parameters and old ones of all the
others. One message per parameter is slow where parameters are small; packing them into a buffer and
out again costs two passes over memory, which on a CPU is as much as the sending.

1. Once, the parameters of each owner move into that owner's slab: a flat buffer, whose pieces
   become the `.data` of the very Parameter objects. Modules, gradients and hooks notice nothing.
2. An exchange is one asynchronous broadcast per slab from its owner, all under way at once: on gloo
   several times as fast as an all-gather. It returns when all have arrived.

Invariants. Pieces begin where allocations of their own could (64 bytes), so kernels compute the
same bits as before. A parameter that has got other memory since (`model.to`, `assign=True`), or
that begins to train, is found by its address, and slabs are laid out anew with the values found.

Cost. One copy of the parameters that train per exchange; no memory beside the parameters, but one
slab while it is being laid out.

PyTorch counterpart: `parameters_as_bucket_view=True` of `ZeroRedundancyOptimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from solution import comm, flat

__all__ = ["Slabs"]


@dataclass(frozen=True)
class _Slab:
    """The parameters of one owner, dtype and device, one after another."""

    owner: int
    memory: torch.Tensor  # 1-D
    parameters: list[torch.Tensor]


class Slabs:
    """Sends parameters from their owners to all ranks of `group`."""

    def __init__(self, group: comm.Group) -> None:
        self._group = group
        self._slabs: list[_Slab] = []
        self._sent: dict[torch.Tensor, int] = {}  # parameter to the address it has to be at
        self._unsent: list[torch.Tensor] = []  # frozen so far

    @torch.no_grad()
    def exchange(self, owners: Mapping[torch.Tensor, int]) -> None:
        """Returns when every parameter that trains has its owner's value, on every rank."""
        if comm.size(self._group) == 1:
            return
        if not self._is_laid_out(owners):
            self._lay_out(owners)
        handles = [comm.broadcast(slab.memory, slab.owner, self._group) for slab in self._slabs]
        for handle in handles:
            handle.wait()
        # A graph from before the exchange is refused on every rank, not on the owner's alone.
        for slab in self._slabs:
            if slab.owner != comm.rank(self._group):
                torch.autograd.graph.increment_version(slab.parameters)

    def _is_laid_out(self, owners: Mapping[torch.Tensor, int]) -> bool:
        return (
            len(self._sent) + len(self._unsent) == len(owners)
            and all(parameter.data_ptr() == address for parameter, address in self._sent.items())
            and not any(map(_can_change, self._unsent))
        )

    def _lay_out(self, owners: Mapping[torch.Tensor, int]) -> None:
        shares: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._unsent = []
        for parameter, owner in owners.items():
            # Once sent, always sent: its memory is a part of the slab.
            if _can_change(parameter) or parameter in self._sent:
                kind = (owner, parameter.dtype, parameter.device)
                shares.setdefault(kind, []).append(parameter)
            else:
                self._unsent.append(parameter)
        self._slabs, self._sent = [], {}
        for (owner, dtype, device), parameters in shares.items():
            offsets, end = flat.aligned_offsets(parameters)
            memory = torch.zeros(end, dtype=dtype, device=device)
            self._slabs.append(_Slab(owner, memory, parameters))
            for parameter, offset in zip(parameters, offsets, strict=True):
                place = memory.as_strided(parameter.shape, flat.strides_for(parameter), offset)
                parameter.data = place.copy_(parameter)
                self._sent[parameter] = place.data_ptr()


def _can_change(parameter: torch.Tensor) -> bool:
    # Optimizers ask for a gradient alone, and a frozen parameter may have been given one by hand.
    return parameter.requires_grad or parameter.grad is not None
