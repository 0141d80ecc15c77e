"""clip_grad_norm_ hangs where a rank has no gradients: that rank takes no part in the reduction.

Expected: the norm of what is there on both ranks, or an error
Got: rank 0 waits in the reduction for ever
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.absent-on-one-rank
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 2
RIGHT = ("norm 1.41", "raised")


def step(rank: int) -> str:
    """Return how clipping ends where the last rank has no gradient."""
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    if rank == 0:
        weight.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    return f"norm {float(norm.full_tensor() if isinstance(norm, DTensor) else norm):.2f}"
