"""What a plain sharded unit keeps and moves: shards, full parameters, gathers.

The first half of `plain_fsdp`: each decision about where a parameter's values are is a method here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class Piece:
    """One parameter: where it is registered, its shard, and its full tensor while there is one."""

    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    full: Any = None
    pending: torch.Tensor | None = None
    token: tuple[Any, Any] = (None, None)  # the gradient that stands for what is pending

    @property
    def local(self) -> torch.Tensor:
        return self.parameter._local_tensor  # type: ignore[attr-defined]  # it is a DTensor


class Storage:
    """The parameters below one module that no unit further down has taken."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, raf: Any, policy: Any, ignored: Any = ()
    ) -> None:
        self.module = module
        self.ignored = {id(parameter) for parameter in ignored}
        self.mesh = mesh
        self.raf = raf
        self.policy = policy
        self.flying: Any = None
        self.is_unsharded = False
        self.gathered: Any = None
        dims = range(mesh.ndim)
        self.group = mesh.get_group(dims[-1])
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.pieces = [self.shard(p, places) for p, places in self.managed().items()]

    # ---------------------------------------------------------------------------- construction

    def managed(self) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in modules_without_units(self.module):
            for name, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in self.ignored:
                    continue
                if hasattr(parameter, "_plain_fsdp_taken"):
                    raise ValueError(f"{name} is shared with a unit further down: tie within one")
                found.setdefault(parameter, []).append((owner, name))
        return found

    def size(self) -> int:
        return dist.get_world_size(self.group)

    def rank(self) -> int:
        return dist.get_rank(self.group)

    def rows(self, whole: torch.Tensor) -> int:
        return -(-whole.shape[0] // self.size())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, as `torch.chunk` deals them out."""
        rows = self.rows(whole)
        return whole[self.rank() * rows : (self.rank() + 1) * rows]

    def shard(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> Piece:
        parameter._plain_fsdp_taken = True  # type: ignore[attr-defined]  # a mark of ours
        local = self.keep(self.cut(parameter.detach()))
        sharded = nn.Parameter(
            self.as_dtensor(local, parameter), requires_grad=parameter.requires_grad
        )
        for owner, name in places:
            owner._parameters[name] = sharded
        return Piece(places, sharded)

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def as_dtensor(self, local: torch.Tensor, like: torch.Tensor) -> DTensor:
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return DTensor.from_local(
            local, self.mesh, placements, shape=like.shape, stride=like.stride(), run_check=False
        )

    # -------------------------------------------------------------------------- full parameters

    def unshard(self) -> None:
        if self.is_unsharded and self.is_fresh():
            return
        self.is_unsharded = False
        if self.flying is not None and self.flying[0] != self.version():
            for _, _, handle in self.flying[1]:
                handle.wait()
            self.flying = None
        if self.flying is None:
            self.launch_gather()
        with self.making_tensors(), torch.no_grad():
            self.land_gather()
        self.is_unsharded = True

    def making_tensors(self) -> AbstractContextManager[Any]:
        """What is made during an evaluation serves the training after it."""
        return torch.inference_mode(False)

    def version(self) -> Any:
        return tuple((id(p.parameter), written(p.parameter)) for p in self.pieces)

    def is_fresh(self) -> bool:
        return bool(self.gathered == self.version())

    def launch_gather(self) -> None:
        self.adopt()
        with self.making_tensors(), torch.no_grad():
            sent = [(pieces, *self.gather(pieces)) for pieces in self.by_dtype()]
        self.flying = (self.version(), sent)

    def adopt(self) -> None:
        """Whatever is registered now is the parameter: a load may have put a new one there."""
        for piece in self.pieces:
            owner, name = piece.places[0]
            current = owner._parameters[name]
            if current is not piece.parameter and isinstance(current, DTensor):
                piece.parameter = current  # type: ignore[assignment]  # a DTensor Parameter
                for other, word in piece.places:
                    other._parameters[word] = piece.parameter
            if piece.full is not None:
                piece.full.requires_grad_(piece.parameter.requires_grad)

    def by_dtype(self) -> list[list[Piece]]:
        found: dict[torch.dtype, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(self.compute_dtype(piece), []).append(piece)
        return list(found.values())

    def compute_dtype(self, piece: Piece) -> torch.dtype:
        return self.policy.param_dtype or piece.parameter.dtype

    def gather(self, pieces: list[Piece]) -> tuple[torch.Tensor, Any]:
        own = torch.cat([self.padded(p.local, p).reshape(-1) for p in pieces])
        own = self.cast_for_gather(own, pieces[0])
        whole = own.new_empty(self.size() * own.numel())
        if self.size() == 1:
            return own, Done()
        return whole, self.send_gather(whole, own)

    def cast_for_gather(self, own: torch.Tensor, piece: Piece) -> torch.Tensor:
        return own.to(self.compute_dtype(piece))

    def send_gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        return dist.all_gather_into_tensor(whole, own, group=self.group, async_op=True)

    def padded(self, local: torch.Tensor, piece: Piece) -> torch.Tensor:
        missing = self.rows(piece.parameter) - local.shape[0]
        return torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local

    def land_gather(self) -> None:
        version, sent = self.flying
        for pieces, whole, handle in sent:
            handle.wait()
            for piece, rows in zip(pieces, self.cut_gathered(pieces, whole), strict=True):
                values = rows.reshape(-1, *piece.parameter.shape[1:])[: piece.parameter.shape[0]]
                self.fill(piece, values.to(self.compute_dtype(piece)))
        self.flying, self.gathered = None, version

    def cut_gathered(self, pieces: list[Piece], whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per parameter `[ranks, elements of a rank]`: the buffer holds a block per rank."""
        lengths = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return whole.view(self.size(), -1).split(lengths, dim=1)

    def fill(self, piece: Piece, values: torch.Tensor) -> None:
        if piece.full is None:
            piece.full = nn.Parameter(values.clone(), requires_grad=piece.parameter.requires_grad)
            return
        piece.full.untyped_storage().resize_(values.numel() * values.element_size())
        with torch.autograd._unsafe_preserve_version_counter(piece.full):
            piece.full.copy_(values)

    def reshard(self) -> None:
        self.register(sharded=True)
        if self.is_unsharded:
            self.is_unsharded = False
            self.free()

    def free(self) -> None:
        for piece in self.pieces:
            piece.full.untyped_storage().resize_(0)

    def register(self, *, sharded: bool) -> None:
        for piece in self.pieces:
            for owner, name in piece.places:
                owner._parameters[name] = piece.parameter if sharded else piece.full

    def prefetch(self) -> None:
        if not self.is_unsharded and self.flying is None:
            self.launch_gather()


def written(tensor: Any) -> tuple[int, int]:
    """Changes with every write: one through the DTensor is not counted by its local tensor."""
    return tensor._version, tensor._local_tensor._version


class Done:
    def wait(self) -> None:
        pass


def modules_without_units(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and what is in it, but for what is sharded already."""
    yield module
    for child in module.children():
        if not hasattr(child, "_plain_fsdp"):
            yield from modules_without_units(child)
