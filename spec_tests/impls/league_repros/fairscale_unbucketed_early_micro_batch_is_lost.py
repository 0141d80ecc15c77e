"""Without buckets a gradient of an earlier micro-batch is never reduced if the last does not use it.

Expected: the first layer's gradient, all from inside no_sync, is the mean 1.5 on its owner
Got: the owner's own local gradient
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (reduce_buffer_size=0 is not the default)
Issue: none found (searched: fairscale ShardedDDP no_sync unused parameter reduce_buffer_size 0 gradient not reduced)
"""

import torch
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the mean and the owner's gradient of a layer that only the first micro-batch uses."""
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    module.forward = lambda x, which: module[which](x)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer, reduce_buffer_size=0)
    x = torch.full((1, 1), rank + 1.0)
    with model.no_sync():
        model(x, 0).sum().backward()
    model(x, 1).sum().backward()
    got = module[0].weight.grad.item() if rank == 0 else None  # rank 0 owns the first layer
    return (1.5 if rank == 0 else None), got
