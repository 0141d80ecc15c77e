"""Where one rank's module has a scalar parameter, FSDP2 raises there, and the others hang.

Expected: an error on both ranks by the end of the first step
Got: an error on rank 1, rank 0 waits forever
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.refusals.unequal-ranks
Case: *-scalar
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
RIGHT = ("raised",)


def step(rank: int) -> str:
    """Return how the first step of unequal modules ends."""
    layer = nn.Linear(4, 4)
    if rank == 1:
        layer.temperature = nn.Parameter(torch.ones(()))
    fully_shard(layer)
    layer(torch.ones(1, 4)).sum().backward()
    return "trained"
