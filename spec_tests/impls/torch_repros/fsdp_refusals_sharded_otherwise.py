"""FSDP2 refuses a parameter that is sharded on another dim with a TypeError that names no
parameter.

Expected: an error that names "weight", or the output of the plain model
Got: an error from within that names no parameter
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.refusals.by-the-first-step
Case: *-sharded-otherwise
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
EXPECTED = [True] * RANKS


def observe(rank: int) -> bool:
    """Return whether the error names the parameter, or the step is right."""
    layer = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    expected = layer(x)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(layer.weight.detach(), mesh, [Shard(1)])
    layer.weight = nn.Parameter(sharded)
    try:
        fully_shard(layer)
        return torch.equal(layer(x), expected)
    except Exception as error:
        if rank == 0:
            print(f"rank 0: {type(error).__name__}: {error}")
        return "weight" in str(error)
