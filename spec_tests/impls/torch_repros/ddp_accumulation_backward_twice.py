"""DistributedDataParallel does not reduce the gradients of a second backward of one forward.

Expected: the mean over ranks of both backwards, 2 * 1.5 = 3 on both ranks, or an error
Got: each rank adds its own second gradient to the mean of the first
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.accumulation.backward-twice
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/reducer.cpp
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
EXPECTED = [3.0] * RANKS


def observe(rank: int) -> float | str:
    """Return the gradient after two backwards of one forward, whose gradients are 1 + rank."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    loss = model(torch.full((1, 1), 1.0 + rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    gradient = model.module.weight.grad
    return float(gradient)
