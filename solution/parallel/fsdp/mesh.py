"""The process groups and placements of one `fully_shard` call.

    1-D mesh   [0 1 2 3]         one group shards
    2-D mesh   [[0 1], [2 3]]    HSDP: rows shard, columns replicate
    2-D mesh   [[0], [1], [2]]   nothing is sharded, all replicate: plain data parallelism

PyTorch counterpart: `FSDPMeshInfo` and `HSDPMeshInfo`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from solution import comm


@dataclass(frozen=True)
class ShardingMesh:
    """The ranks of one `fully_shard` call.

    Attributes:
        mesh: the device mesh of the parameters' DTensors.
        placements: of every parameter on `mesh`.
        shard_group: ranks that hold different rows.
        replica_group: ranks that hold the same rows; None on a 1-D mesh.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_group: comm.Group
    replica_group: comm.Group

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *, device_type: str) -> ShardingMesh:
        """Return the groups of `mesh`; None is a 1-D mesh of all ranks.

        Raises:
            ValueError: not a mesh of one or two dims that contains this rank.
        """
        if mesh is None:
            comm.require_group(None, caller="fully_shard")
            key = (device_type,)
            mesh = _once(key, lambda: init_device_mesh(device_type, (comm.size(),)))
        if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
            raise ValueError(f"expected mesh to be a DeviceMesh of 1 or 2 dims, got {mesh!r}")
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"expected mesh to contain rank {comm.rank()}, got {mesh!r}; only its members shard"
            )
        if mesh.ndim == 1:
            return cls(mesh, (Shard(0),), mesh.get_group(0), None)
        return cls(mesh, (Replicate(), Shard(0)), mesh.get_group(1), mesh.get_group(0))

    @cached_property
    def num_shards(self) -> int:
        """The number of ranks in the shard group."""
        return comm.size(self.shard_group)

    @cached_property
    def num_replicas(self) -> int:
        """The number of ranks in the replica group; 1 on a 1-D mesh."""
        return 1 if self.replica_group is None else comm.size(self.replica_group)

    @cached_property
    def rank(self) -> int:
        """This rank in the shard group."""
        return comm.rank(self.shard_group)

    @property
    def groups(self) -> list[comm.Group]:
        """The groups of all dims, the sharding one first."""
        return [self.shard_group, *([] if self.replica_group is None else [self.replica_group])]

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def require_part(self, num_ranks: int) -> None:
        """Raise ValueError unless `num_ranks` is a proper divisor of the shard group's size."""
        if not 1 < num_ranks < self.num_shards or self.num_shards % num_ranks:
            raise ValueError(
                f"expected reshard_after_forward as an int to divide the {self.num_shards} ranks "
                f"that shard, and to be neither 1 nor all of them, got {num_ranks}"
            )

    def part(self, num_ranks: int) -> comm.Group:
        """Return this rank's group of `num_ranks` neighbours that shard; all ranks call it."""
        kind, ranks = self.mesh.device_type, self.mesh.mesh.view(-1, num_ranks)
        key = (kind, *ranks.shape, *ranks.flatten().tolist())
        return _once(key, lambda: DeviceMesh(kind, ranks)).get_group(1)

    @property
    def reduce_sizes(self) -> tuple[int, int]:
        """The numbers of ranks that `start_reduce` and `reduce_over_replicas` sum over."""
        shards, replicas = self.num_shards, self.num_replicas
        return (shards, replicas) if shards > 1 else (replicas, 1)

    def start_reduce(self, matrix: torch.Tensor) -> tuple[torch.Tensor, comm.Handle]:
        """Start summing `matrix` `[W, m]`, which is used up; return this rank's row `[m]`."""
        if self.num_shards > 1 or self.replica_group is None:
            return comm.reduce_scatter_sum(matrix, self.shard_group)
        return matrix[0], comm.all_reduce_sum(matrix, self.replica_group)

    def reduce_over_replicas(self, row: torch.Tensor) -> None:
        """Sum in place over replicas what `start_reduce` has summed over shards; blocks."""
        if self.reduce_sizes[1] > 1:
            comm.sum_over_ranks(row, self.replica_group)


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, DeviceMesh]]
_made = weakref.WeakKeyDictionary()


def _once(key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    # A mesh may make process groups: keep one of each kind while the default group lives.
    assert dist.group.WORLD is not None  # required by the callers
    made = _made.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]
