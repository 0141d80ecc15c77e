"""ZeroRedundancyOptimizer.load_state_dict keeps the old moments where the loaded state has none.

Expected: the step after the load moves a weight by 1, as with torch.optim.SGD
Got: by 1 + 0.5: the momentum from before the load goes on
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.state.load-replaces
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [[1.0, 1.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return how far a step moves the weights after an empty state was loaded."""
    weights = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=1.0, momentum=0.5)
    moved = []
    for _ in range(2):
        if not moved:
            for to in range(RANKS):  # each rank keeps the state of before the first step
                optimizer.consolidate_state_dict(to=to)
                if to == rank:
                    empty = optimizer.state_dict()
        before = [float(weight) for weight in weights]
        for weight in weights:
            weight.grad = torch.ones(())
        optimizer.step()
        moved = [old - float(new) for old, new in zip(before, weights, strict=True)]
        optimizer.load_state_dict(empty)
    return moved
