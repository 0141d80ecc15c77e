"""An exception inside ShardedDataParallel.no_sync() leaves synchronisation off for good.

Expected: after the block, left by an exception, a backward reduces: 1.5 on the owner
Got: nothing is reduced: 1.0
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.no-sync.restores-after-exception
Issue: none found (searched: fairscale ShardedDDP no_sync exception, try finally)
"""

import contextlib

import torch
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the mean gradient and that of the owner, in the step after the exception."""
    module = nn.Linear(1, 1, bias=False)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    got = module.weight.grad.item() if rank == 0 else None  # rank 0 owns the weight
    return (1.5 if rank == 0 else None), got
