"""The process groups and placements of one `fully_shard` call.

    1-D mesh   [0 1 2 3]         one group shards
    2-D mesh   [[0 1], [2 3]]    HSDP: rows shard, columns replicate
    2-D mesh   [[0], [1], [2]]   nothing is sharded, all replicate: plain data parallelism

PyTorch counterpart: `FSDPMeshInfo` and `HSDPMeshInfo`.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from solution import comm


class ShardingMesh:
    """The ranks of one `fully_shard` call; None is a 1-D mesh of all ranks.

    Attributes:
        placements: of every parameter on `mesh`.
        shard_group: ranks that hold different rows; `num_shards` of them, this one being `rank`.
        replica_group: ranks that hold the same rows; None on a 1-D mesh.
        groups: both of them, or the first.
        reduce_sizes: the numbers of ranks that the two stages of a reduction sum over.

    Raises:
        ValueError: not a mesh of one or two dims that contains this rank.
    """

    def __init__(self, mesh: DeviceMesh | None, *, device_type: str) -> None:
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
        self.mesh = mesh
        self.placements: list[Placement] = [Replicate(), Shard(0)][-mesh.ndim :]
        self.groups: Sequence[comm.Group] = mesh.get_all_groups()[::-1]
        self.shard_group = self.groups[0]
        self.replica_group = self.groups[1] if mesh.ndim == 2 else None
        self.num_shards, self.rank = comm.size(self.shard_group), comm.rank(self.shard_group)
        num_replicas = comm.size(self.replica_group) if mesh.ndim == 2 else 1
        # With one shard the only stage is the sum over replicas.
        several = self.num_shards > 1
        self.reduce_sizes = (self.num_shards, num_replicas) if several else (num_replicas, 1)

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def resharding(self, num_ranks: int) -> bool | int:
        """Return `num_ranks` as `reshard_after_forward`: 1 is False, all that shard are True.

        Raises:
            ValueError: no divisor of the shard group's size.
        """
        if num_ranks < 1 or self.num_shards % num_ranks:
            raise ValueError(
                "expected reshard_after_forward as an int to divide the number of ranks that shard "
                f"({self.num_shards}), got {num_ranks}"
            )
        return num_ranks != 1 and (num_ranks == self.num_shards or num_ranks)

    def part(self, num_ranks: int) -> comm.Group:
        """Return this rank's group of `num_ranks` neighbours that shard; all ranks call it."""
        kind, ranks = self.mesh.device_type, self.mesh.mesh.view(-1, num_ranks)
        key = (kind, *ranks.shape, *ranks.flatten().tolist())
        return _once(key, lambda: DeviceMesh(kind, ranks)).get_group(1)


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, DeviceMesh]]
_made = weakref.WeakKeyDictionary()


def _once(key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    # A mesh may make process groups: keep one of each kind while the default group lives.
    assert dist.group.WORLD is not None  # required by the callers
    made = _made.setdefault(dist.group.WORLD, {})
    if key not in made:
        made[key] = make()
    return made[key]
