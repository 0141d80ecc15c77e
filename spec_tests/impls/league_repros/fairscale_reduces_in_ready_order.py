"""Ranks whose gradients become ready in another order mix up gradients of different parameters.

Expected: gradients of layers 0 and 2, used in another order on rank 1: 2 and 1 on both ranks
Got: half of each other's
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.gradients.rank-dependent-order, ddp.gradients.unused-somewhere, ddp.traffic.same-order-on-all-ranks
Issue: https://github.com/facebookresearch/fairscale/issues/228 is of unused parameters; of order none found (searched: fairscale ShardedDDP rank dependent gradient order reduce)
"""

import torch
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the mean gradients of two layers of rank 0, and what it has."""
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    for layer, value in zip(layers, (1.0, 1.0, 2.0), strict=True):
        nn.init.constant_(layer.weight, value)
    order = (0, 2) if rank == 0 else (2, 0)
    layers.forward = lambda x: layers[order[1]](layers[order[0]](x))
    optimizer = OSS(layers.parameters(), optim=torch.optim.SGD, lr=0.0)
    ShardedDataParallel(layers, optimizer, reduce_buffer_size=0)(torch.ones(1, 1)).backward()
    got = [layers[i].weight.grad for i in (0, 2)]
    return ([2.0, 1.0], [g.item() for g in got]) if rank == 0 else (None, None)
