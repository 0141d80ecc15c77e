"""ZeroRedundancyOptimizer broadcasts frozen parameters in every step.

Expected: a step sends the 4 elements that are trained
Got: it sends the 1000 frozen ones as well
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.traffic.frozen-not-sent
See: https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [4] * RANKS


def observe(rank: int) -> int:
    """Return how many elements a step broadcasts."""
    trained, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1000), False)
    optimizer = ZeroRedundancyOptimizer([trained, frozen], torch.optim.SGD, lr=0.1)
    trained.grad = torch.ones(4)
    sent = []
    usual = dist.broadcast

    def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return usual(tensor, *args, **options)

    dist.broadcast = counting
    optimizer.step()
    dist.broadcast = usual
    return sum(sent)
