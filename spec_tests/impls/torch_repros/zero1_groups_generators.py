"""ZeroRedundancyOptimizer trains nothing where a group's parameters are given as a generator.

Expected: the weights after the step, 0, as torch.optim.SGD gives them
Got: unchanged weights, 1, without an error
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.groups.any-iterable
Case: *generators-of-parameters
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [[0.0, 0.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the weights after a step that takes them from ones to zeros."""
    weights = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]
    groups = [{"params": (weight for weight in weights)}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0)
    for weight in weights:
        weight.grad = torch.ones(())
    optimizer.step()
    return [float(weight) for weight in weights]
