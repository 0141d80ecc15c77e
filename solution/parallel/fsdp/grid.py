"""Who shards with whom, and who holds the same as whom.

    1-D mesh   [0 1 2 3]         one group shards
    2-D mesh   [[0 1], [2 3]]    rows shard, columns replicate: gradients are averaged over both
    2-D mesh   [[0], [1], [2]]   nothing is sharded, all replicate: plain data parallelism

PyTorch counterpart: `FSDPMeshInfo` and `HSDPMeshInfo`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from solution import comm

T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """The ranks of one `fully_shard`.

    Attributes:
        mesh: as DTensors know it.
        placements: of every parameter on `mesh`.
        shard_group: ranks that hold different rows.
        replica_group: ranks that hold the same rows; None on a 1-D mesh.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_group: comm.Group
    replica_group: comm.Group

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *, device_type: str) -> Grid:
        """The grid of `mesh`; None is all ranks in one dim.

        Raises:
            ValueError: something else than a mesh of one or two dims that contains this rank.
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
    def num_ranks(self) -> int:
        """Into how many pieces a parameter is cut."""
        return comm.size(self.shard_group)

    @cached_property
    def rank(self) -> int:
        """Which piece this rank keeps."""
        return comm.rank(self.shard_group)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def require_part(self, num_ranks: int) -> None:
        """Raises ValueError unless so many are a part of the shard group, and divide it."""
        if not 1 < num_ranks < self.num_ranks or self.num_ranks % num_ranks:
            raise ValueError(
                f"expected reshard_after_forward as an int to divide the {self.num_ranks} ranks "
                f"that shard, and to be neither 1 nor all of them, got {num_ranks}"
            )

    def part(self, num_ranks: int) -> comm.Group:
        """This rank's group of `num_ranks` neighbours among those that shard; all ranks call it."""
        kind, ranks = self.mesh.device_type, self.mesh.mesh.view(-1, num_ranks)
        key = (kind, *ranks.shape, *ranks.flatten().tolist())
        return _once(key, lambda: DeviceMesh(kind, ranks)).get_group(1)

    @cached_property
    def stages(self) -> tuple[int, int]:
        """How many ranks `start_sum` sums over, and how many `sum_over_replicas` after it."""
        shards = self.num_ranks
        replicas = 1 if self.replica_group is None else comm.size(self.replica_group)
        return (shards, replicas) if shards > 1 else (replicas, 1)

    def start_sum(self, matrix: torch.Tensor) -> tuple[torch.Tensor, comm.Handle]:
        """Starts summing `matrix` `[W, m]` (used up): the sum of this rank's row, the handle."""
        if self.num_ranks > 1 or self.replica_group is None:
            return comm.reduce_scatter_sum(matrix, self.shard_group)
        return matrix[0], comm.all_reduce_sum(matrix, self.replica_group)

    def sum_over_replicas(self, row: torch.Tensor) -> torch.Tensor:
        """The sum of what was summed over shards; waits."""
        if self.stages[1] > 1:
            comm.sum_over_ranks(row, self.replica_group)
        return row

    def agrees(self, checksum: int) -> bool:
        """Whether it is the same on all ranks of the mesh; told to every one of them."""
        is_same = comm.agree(checksum, self.shard_group)
        if self.replica_group is None:
            return is_same
        # Also when the row disagrees: its columns wait, and are to hear of it.
        told = checksum if is_same else -1
        return comm.agree(told, self.replica_group) and is_same

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's plain `value`, row after row of the mesh; all ranks call it."""
        row = comm.gather_objects(value, self.shard_group)
        if self.replica_group is None:
            return row
        return list(itertools.chain.from_iterable(comm.gather_objects(row, self.replica_group)))


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, DeviceMesh]]
_made = weakref.WeakKeyDictionary()


def _once(key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """A mesh may make process groups: one of each kind, for as long as the default group lives."""
    assert dist.group.WORLD is not None  # or nobody could have asked for a grid
    made = _made.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]
