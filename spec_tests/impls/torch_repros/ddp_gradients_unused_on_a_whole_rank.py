"""Where a rank's loss touches no parameter, DistributedDataParallel hangs on the other ranks,
find_unused_parameters=True or not.

Expected: every rank ends the step, with the mean or an error
Got: rank 0 waits in its backward for ever
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.gradients.unused-on-a-whole-rank
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
RIGHT = ("ended its backward", "raised")


def step(rank: int) -> str:
    """Return how a step ends in which the last rank's batch has nothing to learn from."""
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    loss = model(torch.ones(1, 2)).sum()
    if rank == 1:
        loss = torch.zeros((), requires_grad=True)
    loss.backward()
    return "ended its backward"
