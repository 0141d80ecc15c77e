"""In a sub-group ShardedDataParallel compares a group rank with a global rank and drops the gradient.

Expected: in the group of ranks 1 and 2 the owner, global rank 1, holds the mean 2.5
Got: None on the owner
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.group.divides-by-its-size, ddp.group.keeps-to-itself
Issue: none found (searched: fairscale ShardedDDP process_group subgroup gradient None dst_rank global_rank)
"""

import torch
import torch.distributed as dist
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 3


def observe(rank: int) -> tuple[object, object]:
    """Return the mean gradient over ranks 1 and 2, and what their owner has."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None, None
    module = nn.Linear(1, 1, bias=False)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, group=group, lr=0.0)
    model = ShardedDataParallel(module, optimizer, process_group=group)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    gradient = module.weight.grad
    got = None if gradient is None else gradient.item()
    return (2.5, got) if rank == 1 else (None, None)
