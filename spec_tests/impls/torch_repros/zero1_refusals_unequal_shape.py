"""Where shapes differ between ranks, ZeroRedundancyOptimizer does not notice, and gloo aborts.

Expected: an error on both ranks by the end of the first step
Got: a process is ended by SIGABRT
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.refusals.unequal-ranks
Case: *-shape
See: https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
RIGHT = ("raised",)


def step(rank: int) -> str:
    """Return how the first step with unequal parameters ends."""
    weights = [nn.Parameter(torch.ones(5 - rank)), nn.Parameter(torch.ones(3))]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return "ended its step"
