"""What `fully_shard` refuses, before anything is changed, and on every rank alike.

What one rank alone would refuse, or shard otherwise, would leave the others waiting in a gather. So
ranks also compare a checksum of what they were called with, and of their refusals: one collective
of 16 bytes per call, and the descriptions themselves where checksums differ.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.policy import MixedPrecisionPolicy


def require_module(module: object) -> None:
    """Raises unless it is one: nothing else can be said about it, to this rank or to others."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module to shard, got {type(module).__name__}")


def require_shardable(
    module: nn.Module, reshard_after_forward: object, policy: object, *, is_sharded: bool
) -> None:
    """Raises unless `module` can be a unit, by its kind, with these options."""
    name = type(module).__name__
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"expected mp_policy of {name} to be a MixedPrecisionPolicy, got {policy!r}"
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(
            f"expected reshard_after_forward of {name} to be a bool, a number of ranks or None, "
            f"got {reshard_after_forward!r}"
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"expected a module with a forward, got the container {name}; shard what is in it"
        )
    if is_sharded:
        raise ValueError(
            f"expected a module that is not sharded yet, got {name}; call fully_shard once on each "
            "module, inner ones first"
        )
    types = sorted({p.device.type for p in module.parameters() if not p.is_meta})
    if len(types) > 1:
        raise ValueError(f"expected {name} on one device, got {types}; move it first")


def require_cuttable(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Raises, by name, for a parameter that has no rows to be cut into."""
    described = described_as(module, name, parameter)
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


def described_as(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """As errors call it."""
    what = f"{parameter.dtype}, shape {tuple(parameter.shape)}"
    return f"{name!r} of {type(module).__name__} ({what})"


def device_type(module: nn.Module) -> str:
    """Where the module is; for one without values yet, where it is expected to be."""
    for parameter in module.parameters():
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
    error, lines = None, []
    try:
        lines = describe()
    except (ValueError, NotImplementedError) as caught:
        error, lines = caught, [f"the refusal {str(caught)!r}"]
    is_same = grid.agrees(zlib.crc32(repr(lines).encode()))
    told = [lines] if is_same else grid.gather_objects(lines)
    if error is not None:
        raise error
    if is_same:
        return
    for said in itertools.zip_longest(*told, fillvalue="nothing more"):
        others = [place for place, line in enumerate(said) if line != said[0]]
        if others:
            raise ValueError(
                f"expected all ranks to call fully_shard on {subject} alike, got {said[0]} on the "
                f"first rank of its mesh and {said[others[0]]} on number {others[0]}"
            )
