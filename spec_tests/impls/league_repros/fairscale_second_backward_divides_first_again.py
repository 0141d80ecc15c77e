"""Of two synchronised backwards ShardedDataParallel divides the first one's mean again.

Expected: the means of both backwards, 1.5 + 1.5, on the owner
Got: 1.5 / 2 + 1.5
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.accumulation.one-finish
Issue: none found (searched: fairscale ShardedDDP gradient accumulation without no_sync wrong gradient)
"""

import torch
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the sum of two mean gradients, and that of the owner."""
    module = nn.Linear(1, 1, bias=False)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer)
    for _ in range(2):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    got = module.weight.grad.item() if rank == 0 else None  # rank 0 owns the weight
    return (3.0 if rank == 0 else None), got
