"""clip_grad_norm_ of order infinity loses a NaN that is on another rank than the first.

Expected: nan on both ranks
Got: the largest number of the rank without NaN
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.nonfinite.largest-of-nan
Case: *-1
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 2
EXPECTED = ["nan"] * RANKS


def observe(rank: int) -> str:
    """Return the largest element of a gradient that has a NaN on the last rank."""
    mesh = init_device_mesh("cpu", (RANKS,))
    local = torch.tensor([3.0 if rank == 0 else float("nan")])
    weight = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)]))
    weight.grad = DTensor.from_local(local, mesh, [Shard(0)])
    norm = nn.utils.clip_grad_norm_([weight], 100.0, float("inf"))
    return str(float(norm.full_tensor()))
