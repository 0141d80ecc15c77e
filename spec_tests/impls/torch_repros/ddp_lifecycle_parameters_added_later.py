"""DistributedDataParallel trains a parameter that is added later on each rank by itself.

Expected: its gradient is the mean, 2, on both ranks, or there is an error
Got: 1 on the first rank and 3 on the second, and no error
Versions: torch 2.13.0, checked 2026-11-26
Clause: ddp.lifecycle.parameters-added-later
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
EXPECTED = [2.0] * RANKS


def observe(rank: int) -> float:
    """Return the gradient of what is added, which is 1 on the first rank and 3 on the second."""
    layer = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(layer)
    layer.bias = nn.Parameter(torch.zeros(1))
    (wrapped(torch.ones(1, 1)) * (1 + 2 * rank)).sum().backward()
    return layer.bias.grad.item()
