"""Clipping of gradients by their global norm, also where parameters are sharded.

Problem: the norm is that of all gradients together, and a rank may hold only its rows of them.

Idea: sum |x|^p over what this rank holds; add the sums of the ranks that hold other rows; take the
p-th root once.

Steps
    1. Replicated gradients: this rank has all of them, so nothing is sent.
    2. Sharded ones (DTensors with a `Shard` placement): for each process group, all-gather the
       partial sums over the mesh dim that shards, and add them in order of rank, so that all ranks
       get the same bits.
    3. Multiply every gradient by max_norm / (norm + 1e-6) where that is below 1.
    For p = inf sums become maxima. With error_if_nonfinite all ranks raise before any scaling.

Use
    norm = clip_grad_norm_(model.parameters(), max_norm=1.0)        # before scaling

Cost: one pass over the gradients in float64, one number per rank, one pass to scale.

Source: torch.nn.utils.clip_grad_norm_, and Pascanu et al. 2013.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()
def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`.

    Returns:
        The norm before scaling.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    norm = global_norm(tensors, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was scaled")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(factor)
    return norm


def global_norm(tensors: Sequence[Any], order: float) -> torch.Tensor:
    """Return the norm of all gradients together, with those that other ranks hold."""
    copies = [t.grad for t in tensors if t.grad is not None and not is_divided(t.grad)]
    parts = [part(copies, order)]
    for group, alike in by_group(tensors).items():
        own = part([tensor.grad for tensor in alike if tensor.grad is not None], order)
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, own, group=group)
        parts += everyones
    together = torch.stack(parts)
    return together.max() if order == math.inf else together.sum().pow(1.0 / order)


def by_group(tensors: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return what is divided, with a gradient on this rank or without: peers wait for its part."""
    found: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if is_divided(tensor if tensor.grad is None else tensor.grad):
            group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
            found.setdefault(group, []).append(tensor)
    return found


def is_divided(tensor: torch.Tensor) -> bool:
    """True if other ranks hold other elements of the tensor."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Shard) for placement in tensor.placements
    )


def part(gradients: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Return the sum of |x|^p, or the largest |x|, of what this rank holds."""
    sizes = [local(gradient).reshape(-1).abs() for gradient in gradients]
    flat = torch.cat([torch.zeros(1), *sizes]).double()
    return flat.max() if order == math.inf else flat.pow(order).sum()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PlainClip:
    """What this file offers."""

    @staticmethod
    def functions() -> dict[str, Any]:
        """Return the contract's function."""
        return {"clip_grad_norm_": clip_grad_norm_}
