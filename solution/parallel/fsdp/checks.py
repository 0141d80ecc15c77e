"""What `fully_shard` refuses, before anything is changed, and on every rank alike.

What one rank alone would refuse, or shard otherwise, would leave the others waiting in a gather. So
ranks also compare a checksum of what they were called with: one collective of 16 bytes per call.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.param import Place
from solution.parallel.fsdp.policy import MixedPrecisionPolicy


def require_shardable(module: nn.Module, policy: object, *, is_sharded: bool) -> None:
    """Raises unless `module` can be a unit, by its kind."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module to shard, got {type(module).__name__}")
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(f"expected mp_policy to be a MixedPrecisionPolicy, got {policy!r}")
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


def require_cuttable(name: str, parameter: nn.Parameter) -> None:
    """Raises, by name, for a parameter that has no rows to be cut into."""
    described = f"{name!r} ({parameter.dtype}, shape {tuple(parameter.shape)})"
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"expected plain parameters, got the DTensor {described}; call fully_shard on inner "
            "modules first, and on nothing that is distributed already"
        )
    owner = getattr(parameter, "_fsdp_owner", None)
    if owner is not None:
        raise ValueError(
            f"expected tied parameters in one unit, got {described}, which a {owner} has taken "
            "already; shard the smallest module that contains both"
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


def device_type(module: nn.Module) -> str:
    """Where the module is; for one without values yet, where it is expected to be."""
    types = {p.device.type for p in module.parameters() if not p.is_meta}
    if len(types) > 1:
        raise ValueError(
            f"expected {type(module).__name__} on one device, got {sorted(types)}; move it first"
        )
    if types:
        return types.pop()
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_same_on_all_ranks(
    module: nn.Module,
    found: list[tuple[str, nn.Parameter, list[Place]]],
    grid: Grid,
    options: tuple[object, ...],
) -> None:
    """Raises ValueError, on every rank, unless all ranks shard the same with the same `options`."""
    described = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p, _ in found]
    subject = f"{type(module).__name__} with {len(found)} parameters, {options}"
    checksum = zlib.crc32(repr((subject, described)).encode())
    grid.require_agreement(checksum, subject=subject)
