"""The mesh and the dtypes of one `fully_shard` call, and the refusals of what it cannot shard.

All ranks call `fully_shard` and compare what they were called with, refusals included, before
anything is changed (`agreement.py`): a rank that refuses alone, or shards otherwise, would leave
the others waiting in an all-gather. Refused on one rank alone are what is no module and a bad mesh:
without them there is no group to ask.

    shard, gradient, optimizer    the parameter's own dtype, always
    all-gather, forward, backward param_dtype; inputs are cast, unless cast_forward_inputs=False
    local sum, reduce-scatter     reduce_dtype, else the dtype of the backward
    outputs                       output_dtype, else unchanged

PyTorch counterpart: the classes of the same names, `FSDPMeshInfo` and `HSDPMeshInfo`.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parameter import is_lazy

from solution import comm


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one `fully_shard` call; None leaves a dtype unchanged.

    A layer's own policy comes before that of the model around it. Buffers are never cast.

    Raises:
        ValueError: a dtype that is no floating-point `torch.dtype`.
    """

    param_dtype: torch.dtype | None = None  # of parameters in all-gathers and in computation
    reduce_dtype: torch.dtype | None = None  # of gradients in reductions, and between them
    output_dtype: torch.dtype | None = None  # of the module's floating-point outputs
    cast_forward_inputs: bool = True  # whether floating-point inputs are cast to `param_dtype`

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            is_dtype = isinstance(value, torch.dtype) and value.is_floating_point
            if value is not None and not is_dtype:
                raise ValueError(
                    f"expected {name} to be a floating-point torch.dtype or None, got {value!r}"
                )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Return the dtype that floating-point inputs are cast to."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class OffloadPolicy:
    """The policy that keeps shards on the device that computes. There is no other."""


class ShardingMesh:
    """The process groups and placements of one `fully_shard` call; None is a 1-D mesh of all ranks.

        1-D mesh   [0 1 2 3]         one group shards
        2-D mesh   [[0 1], [2 3]]    HSDP: rows shard, columns replicate
        2-D mesh   [[0], [1], [2]]   nothing is sharded, all replicate: plain data parallelism

    Attributes:
        shard_group: ranks that hold different rows; `num_shards` of them, this one being `rank`.
        replica_group: ranks that hold the same rows; None on a 1-D mesh.
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
        if (kind := self.mesh.device_type) == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.accelerator.current_device_index())

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


# ------------------------------------------------------------------------------------ refusals


def as_modules(module: object) -> list[nn.Module]:
    """Return the module, or those of the list that are not inside another one of it.

    Raises:
        TypeError: neither a module nor a list of modules.
        ValueError: an empty list.
    """
    given: list[nn.Module] = []
    for part in module if isinstance(module, list | tuple) else [module]:
        if not isinstance(part, nn.Module):
            raise TypeError(f"expected an nn.Module to shard, got {type(part).__name__}")
        given.append(part)
    if not given:
        raise ValueError("expected a module to shard, or several, got an empty list")
    inside = {child for part in given for child in part.modules() if child is not part}
    return [part for part in given if part not in inside]


def require_options(
    name: str, reshard_after_forward: object, policy: object, offload: object, dp_mesh_dims: object
) -> None:
    """Raise for options of the wrong type, and for those of PyTorch's that are not offered."""
    if type(offload) is not OffloadPolicy:
        raise NotImplementedError(
            f"expected offload_policy of {name} to be OffloadPolicy(), got {offload!r}; "
            "shards stay on the device that computes: shard over more ranks if they do not fit"
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"expected dp_mesh_dims of {name} to be None, got {dp_mesh_dims!r}; pass the "
            "data-parallel part of the mesh, as in mesh=mesh['replicate', 'shard']"
        )
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"expected mp_policy of {name} to be a MixedPrecisionPolicy, got {policy!r}"
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(
            f"expected reshard_after_forward of {name} to be a bool, a number of ranks or None, "
            f"got {reshard_after_forward!r}"
        )


def require_shardable(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], *, sharded_class: type
) -> None:
    """Raise for containers, for modules that are sharded already, and for several device types."""
    for module in modules:
        name = type(module).__name__
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_container and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"expected a module with a forward, got the container {name}; shard what is in it"
            )
        if isinstance(module, sharded_class):
            raise ValueError(
                f"expected a module that is not sharded yet, got {name}; call fully_shard once on "
                "each module, inner ones first"
            )
    types = sorted({p.device.type for p in parameters if not p.is_meta})
    if len(types) > 1:
        names = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(f"expected {names} on one device, got {types}; move it first")


def require_dense(places: Iterable[tuple[nn.Module, str]]) -> None:
    """Raise for an embedding that writes to its weight, or whose gradient is sparse."""
    for module, name in places:
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.max_norm or (module.sparse and module.weight.requires_grad):
            option = "max_norm" if module.max_norm else "sparse"
            raise NotImplementedError(
                f"expected dense gradients, and forwards that only read {name!r}, got {module}, of "
                f"whose {option} the shards would see nothing; make it without {option}"
            )


def described_rows(
    module: str,
    name: str,
    parameter: nn.Parameter,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
) -> str:
    """Return a description; raise for a parameter that cannot be cut along dim 0, or should not."""
    shape = "unknown" if is_lazy(parameter) else tuple(parameter.shape)
    described = f"{name!r} of {module} ({parameter.dtype}, shape {shape})"
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"expected plain parameters, got the DTensor {described}; call fully_shard on inner "
            "modules first, and on nothing that is distributed already"
        )
    owner = getattr(parameter, "_fsdp_owner", None)
    if owner is not None:
        raise ValueError(
            f"expected tied parameters in one unit, got {described}, which a {owner} has taken "
            "already; shard both in one call, as a list or as the smallest module around them"
        )
    if is_lazy(parameter):
        raise ValueError(
            f"expected parameters with a shape, got the lazy {described}; run one forward first"
        )
    if parameter.ndim == 0:
        raise ValueError(
            f"expected parameters with a dim to cut, got the scalar {described}; make it a vector"
        )
    if parameter.is_complex():
        raise ValueError(
            f"expected real parameters, got {described}; take torch.view_as_real of it"
        )
    refuse_extensions(parameter, described)
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"expected contiguous parameters, got {described} with strides {parameter.stride()}; "
            "call contiguous() on it"
        )
    placement = shard_placement_fn(parameter) if shard_placement_fn else None
    if placement is not None and placement != Shard(0):
        raise NotImplementedError(
            f"expected shard_placement_fn to say None or Shard(0), got {placement!r} for "
            f"{described}; parameters are cut along dim 0"
        )
    return described


def refuse_extensions(tensor: torch.Tensor, described: str) -> None:
    """Raise NotImplementedError for a tensor with methods that PyTorch's all-gather calls."""
    for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        if hasattr(tensor, method):
            raise NotImplementedError(
                f"expected parameters that are gathered as they are, got {described} with "
                f"{method} of {type(tensor).__name__}, which nothing would call"
            )
