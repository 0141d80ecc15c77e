"""clip_grad_norm_ of order infinity raises on a rank with an empty shard; its peers hang.

Expected: the largest element, 3, on both ranks
Got: an error on rank 1, rank 0 waits forever
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.empty-shards
Case: *-inf
Known: https://github.com/pytorch/pytorch/pull/173238
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
RIGHT = ("norm 3.0",)


def step(rank: int) -> str:
    """Return the largest element of a gradient of one row, which only the first rank has."""
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.full((1,), 3.0), mesh, [Shard(0)])
    norm = nn.utils.clip_grad_norm_([weight], 100.0, float("inf"))
    return f"norm {float(norm.full_tensor())}"
