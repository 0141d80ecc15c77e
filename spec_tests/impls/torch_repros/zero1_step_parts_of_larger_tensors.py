"""ZeroRedundancyOptimizer sends wrong rows of a parameter that is a part of a larger tensor.

Expected: all ones after a step from twos along gradients of ones, on both ranks
Got: on rank 1 the last rows are old, and what lies between the rows has changed
Versions: torch 2.13.0, checked 2026-11-24
Clause: zero1.step.parts-of-larger-tensors
Case: *
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [[1.0] * 9] * RANKS


def observe(rank: int) -> list[float]:
    """Return a weight of three columns of a 3 x 4 tensor after a step from twos to ones."""
    whole = torch.full((3, 4), 2.0)
    weight = nn.Parameter(whole[:, :3])
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    return weight.flatten().tolist()
