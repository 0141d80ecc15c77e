"""ZeroRedundancyOptimizer ignores a rate that the closure of a step sets, and reverts it.

Expected: the weights after the step, -0.5, and the rate, 0.5, as torch.optim.SGD gives them
Got: -1 and 1
Versions: torch 2.13.0, checked 2026-11-26
Clause: zero1.groups.rate-set-by-closure
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [[-0.5, 0.5]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the weight and the rate after a step from zero with a gradient of one."""
    weight = nn.Parameter(torch.zeros(()))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)

    def closure() -> float:
        optimizer.param_groups[0]["lr"] = 0.5
        weight.grad = torch.ones(())
        return 0.0

    optimizer.step(closure)
    return [weight.item(), optimizer.param_groups[0]["lr"]]
