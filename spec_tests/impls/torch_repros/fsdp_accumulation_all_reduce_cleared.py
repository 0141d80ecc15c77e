"""FSDP2 on a hybrid mesh keeps gradients that wait for the all-reduce where zero_grad does not
reach them.

Expected: the gradient of the micro-batch after zero_grad, 1
Got: that of the discarded micro-batch is added, 101
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.accumulation.all-reduce-at-the-last
Case: *-cleared
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 4
EXPECTED = [1.0] * RANKS


def observe(rank: int) -> float:
    """Return the gradient of a window whose first micro-batch was discarded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 1), 100.0)).sum().backward()
    model.zero_grad()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    return float(gradient.full_tensor()[0, 0])
