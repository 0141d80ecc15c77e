"""FSDP2 with one rank per shard group divides by the gradient divide factor twice.

Expected: a sum over two replicas of 1 + 1, divided by the factor 2: 1
Got: divided by it twice, 0.5
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.divide-factor-over-replicas
Case: *-4x1
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.0] * RANKS


def observe(rank: int) -> float:
    """Return a gradient of a step on a mesh of two replicas and no shards."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    return float(gradient.full_tensor()[0, 0])
