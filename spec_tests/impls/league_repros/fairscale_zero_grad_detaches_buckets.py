"""optimizer.zero_grad() makes ShardedDataParallel reduce buckets that hold no gradients.

Expected: after zero_grad() the owner's gradient is the mean over ranks, 13.5
Got: the owner's own local gradient, 9.0
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.training.equals-full-batch, ddp.gradients.zero-grad-modes
Issue: https://github.com/facebookresearch/fairscale/issues/354
"""

import torch
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the mean gradient and that of the owner, in a step after optimizer.zero_grad()."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 9))
    nn.init.ones_(module[1].weight)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer)
    for _ in range(2):
        optimizer.zero_grad()  # sets .grad to None: it was a view of the bucket
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    got = module[0].weight.grad.item() if rank == 0 else None  # rank 0 owns the first weight
    return (13.5 if rank == 0 else None), got
