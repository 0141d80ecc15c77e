"""Ranks that share a GPU: NCCL wants a device each, so they talk over gloo.

PyTorch's functional collectives, which a DTensor uses, crash on a GPU's tensors over gloo (torch
2.11: `all_gather_into_tensor` of `torch.ops._c10d_functional` ends in a segmentation fault within
300 calls), while those of `torch.distributed` work. So the former are made of the latter here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _resolve_process_group


def avoid_functional_collectives() -> None:
    """Let DTensors gather and reduce with `torch.distributed`, until this process ends."""
    theirs: Any = functional
    theirs.all_gather_tensor = _all_gather
    theirs.all_reduce = _all_reduce


def _all_gather(part: torch.Tensor, gather_dim: int, group: Any, tag: str = "") -> torch.Tensor:
    found = _resolve_process_group(functional._resolve_group_name(group, tag))
    size = dist.get_world_size(found)
    whole = part.new_empty(size * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=found)
    return torch.cat(whole.chunk(size), dim=gather_dim)


def _all_reduce(own: torch.Tensor, reduceOp: str, group: Any, tag: str = "") -> torch.Tensor:
    found = _resolve_process_group(functional._resolve_group_name(group, tag))
    total = own.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=getattr(dist.ReduceOp, reduceOp.upper()), group=found)
    return total
