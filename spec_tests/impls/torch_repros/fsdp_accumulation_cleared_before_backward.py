"""In FSDP2 the model's zero_grad, between forward and backward, clears nothing of the root.

Expected: the gradient of the bias of one backward, [1, 1]
Got: that of two, [2, 2]: the root shows full parameters then, and its shards keep their gradients
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.accumulation.cleared-before-backward
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[1.0, 1.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the gradient of the bias after two steps, each of which clears it late."""
    model = fully_shard(nn.Linear(1, 2))
    bias = model.bias
    for _ in range(2):
        loss = model(torch.ones(1, 1)).sum()
        model.zero_grad()
        loss.backward()
    gradient: list[float] = bias.grad.full_tensor().tolist()
    return gradient
