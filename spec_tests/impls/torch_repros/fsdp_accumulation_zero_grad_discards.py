"""FSDP2 keeps unreduced gradients where zero_grad does not reach them, and reduces them with the
next step's.

Expected: the gradient of the micro-batch after zero_grad, 1
Got: that of the discarded micro-batch is added, 101
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.accumulation.zero-grad-discards
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.0] * RANKS


def observe(rank: int) -> float:
    """Return the gradient of a window whose first micro-batch was discarded."""
    model = fully_shard(nn.Linear(1, 1, bias=False))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 100.0)).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    return float(gradient.full_tensor())
