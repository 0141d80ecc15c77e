"""FSDP2 leaves a parameter untrained that was frozen for a step, where full weights are kept.

Expected: after it is thawed, the gradient of its bias is [1, 1]
Got: None: the full parameter that was kept goes on to need no gradient
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.backward.frozen-while-kept
Case: *-backward
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[1.0, 1.0]] * RANKS


def observe(rank: int) -> list[float] | None:
    """Return the gradient of a bias that was frozen in the backward before, and is thawed."""
    model = fully_shard(nn.Linear(1, 2))
    bias = model.bias
    model.set_reshard_after_backward(False)
    for trains in (False, True):
        bias.requires_grad_(trains)
        model(torch.ones(1, 1)).sum().backward()
    return None if bias.grad is None else bias.grad.full_tensor().tolist()
