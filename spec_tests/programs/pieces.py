"""Pieces: what a rank has of a tensor; the parent puts them together.

`DTensor.full_tensor` is a collective of some milliseconds for each tensor, and a program shows a
hundred. A piece travels with the ranks that have the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Seen = Sequence[tuple[str, dict[str, Any]]]
"""What each call of a program showed on a rank: tensors, pieces or None, by name."""


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    Attributes:
        local: the values, as float64.
        shape: of the whole tensor.
        dim: the dimension that is divided.
        ranks: numbers of the ranks with all parts, in their order; this one alone where none is
            divided.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Piece:
        """Return what this rank has of a DTensor, copied."""
        mesh, local = tensor.device_mesh, exact(tensor.to_local())
        here = list(mesh.get_coordinate())
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard():
                here[axis] = slice(None)
                ranks = tuple(mesh.mesh[tuple(here)].tolist())
                return cls(local, tuple(tensor.shape), placement.dim, ranks)
        return cls(local, tuple(tensor.shape), 0, (int(mesh.mesh[tuple(here)]),))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values as float64, which holds them exactly."""
    return tensor.detach().clone().double()


def put_together(ranks: Sequence[Seen]) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return what each rank saw, with whole tensors in the place of pieces.

    Where a rank lacks its piece, those that need it have no tensor either.
    """
    return [
        [
            (call, {name: _whole(found, number, name, ranks) for name, found in shown.items()})
            for number, (call, shown) in enumerate(seen)
        ]
        for seen in ranks
    ]


def _whole(found: Any, number: int, name: str, ranks: Sequence[Seen]) -> Any:
    if not isinstance(found, Piece):
        return found
    others = [ranks[rank][number][1].get(name) for rank in found.ranks]
    parts = [other.local for other in others if isinstance(other, Piece)]
    return torch.cat(parts, dim=found.dim) if len(parts) == len(others) else None
