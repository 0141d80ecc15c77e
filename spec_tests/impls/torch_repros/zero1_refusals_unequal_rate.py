"""ZeroRedundancyOptimizer takes ranks with unequal learning rates without an error.

Expected: an error on every rank
Got: each parameter is updated at the rate of the rank that owns it
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.refusals.unequal-ranks
Case: *-rate
See: https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = ["an error"] * RANKS


def observe(rank: int) -> str:
    """Return the error, or the weights after a step."""
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    try:
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=[0.5, 0.25][rank])
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    except Exception:
        return "an error"
    return f"weights {[float(weight[0]) for weight in weights]}"
