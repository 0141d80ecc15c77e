"""What `fully_shard` refuses, before anything is changed, and on every rank alike.

(But for what is no module at all, and a bad mesh: about these a rank cannot even ask the others.)
What one rank alone would refuse, or shard otherwise, would leave the others waiting in a gather. So
ranks also compare a checksum of what they were called with, and of their refusals: one collective
of 16 bytes per call, and the descriptions themselves where checksums differ.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from solution.parallel.fsdp.unit import Unit


def as_modules(module: object) -> list[nn.Module]:
    """The module, or the list without what is inside of another of its modules.

    Raises:
        TypeError: neither: nothing else can be said about it, to this rank or to others.
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


def require_offered(name: str, offload_policy: object, dp_mesh_dims: object) -> None:
    """Raises for options of PyTorch's that exist here by name only."""
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(
            f"expected offload_policy of {name} to be OffloadPolicy(), got {offload_policy!r}; "
            "shards stay on the device that computes: shard over more ranks if they do not fit"
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"expected dp_mesh_dims of {name} to be None, got {dp_mesh_dims!r}; pass the "
            "data-parallel part of the mesh, as in mesh=mesh['replicate', 'shard']"
        )


def require_options(name: str, reshard_after_forward: object, policy: object) -> None:
    """Raises unless these are of the types that they should be."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"expected mp_policy of {name} to be a MixedPrecisionPolicy, got {policy!r}"
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(
            f"expected reshard_after_forward of {name} to be a bool, a number of ranks or None, "
            f"got {reshard_after_forward!r}"
        )


def require_shardable(module: nn.Module, *, is_sharded: bool) -> None:
    """Raises unless `module` can be a unit, by its kind."""
    name = type(module).__name__
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"expected a module with a forward, got the container {name}; shard what is in it"
        )
    if is_sharded:
        raise ValueError(
            f"expected a module that is not sharded yet, got {name}; call fully_shard once on each "
            "module, inner ones first"
        )


def require_one_device(name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Raises unless all parameters that have values are where the first one is."""
    types = sorted({p.device.type for p in parameters if not p.is_meta})
    if len(types) > 1:
        raise ValueError(f"expected {name} on one device, got {types}; move it first")


def require_cuttable(described: str, parameter: nn.Parameter) -> None:
    """Raises for a parameter that has no rows to be cut into."""
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
    if not parameter.is_floating_point():
        raise ValueError(
            f"expected floating-point parameters, got {described}; register it as a buffer"
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"expected contiguous parameters, got {described} with strides {parameter.stride()}; "
            "call contiguous() on it"
        )


def require_embeddings(unit: Unit) -> None:
    """Raises for a unit whose backward needs its weights: all but those of embeddings."""
    for parameter in unit.parameters:
        for module, _ in parameter.places:
            if not any(base.__name__.endswith("Embedding") for base in type(module).__mro__):
                raise ValueError(
                    f"expected a unit of Embeddings only, whose backward needs no weights, got "
                    f"{parameter.name!r} of {type(module).__name__} in {unit.name}"
                )


def require_rows(described: str, placement: object) -> None:
    """Raises unless a `shard_placement_fn` asks for what is done anyway."""
    if placement is not None and placement != Shard(0):
        raise NotImplementedError(
            f"expected shard_placement_fn to say None or Shard(0), got {placement!r} for "
            f"{described}; parameters are cut along dim 0"
        )


def described_as(module: str, name: str, parameter: nn.Parameter) -> str:
    """As errors call it."""
    shape = "unknown" if is_lazy(parameter) else tuple(parameter.shape)
    return f"{name!r} of {module} ({parameter.dtype}, shape {shape})"


def device_type(parameters: Sequence[nn.Parameter]) -> str:
    """Where they are; for those without values yet, where they are expected to be."""
    for parameter in parameters:
        if not parameter.is_meta:
            return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_same_on_all_ranks(grid: Grid, subject: str, describe: Callable[[], list[str]]) -> None:
    """Calls `describe` on all ranks of `grid`; raises on all unless none does and all say the same.

    Args:
        subject: what is being sharded.

    Raises:
        ValueError: says what differs first, and on which rank; or this rank's own error.
    """
    error: Exception | None = None
    lines: list[str] = []
    try:
        lines = describe()
    except Exception as caught:  # also what a caller's own function raises: others wait for us
        error, lines = caught, [f"the refusal {str(caught)!r}"]
    is_same = grid.agrees(zlib.crc32(repr(lines).encode()))
    told = [lines] if is_same else grid.gather_objects(lines)
    if error is not None:
        try:
            raise error
        finally:
            del error  # it holds this frame, and so the refused module
    if is_same:
        return
    for said in itertools.zip_longest(*told, fillvalue="nothing more"):
        others = [place for place, line in enumerate(said) if line != said[0]]
        if others:
            raise ValueError(
                f"expected all ranks to call fully_shard on {subject} alike, got {said[0]} on the "
                f"first rank of its mesh and {said[others[0]]} on number {others[0]}"
            )
