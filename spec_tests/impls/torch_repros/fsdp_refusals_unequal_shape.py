"""Where one rank's module has another shape, FSDP2 does not notice, and gloo aborts.

Expected: an error on both ranks by the end of the first step
Got: a process is ended by SIGABRT
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.refusals.unequal-ranks
Case: *-shape
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
        layer = nn.Linear(4, 5)
    fully_shard(layer)
    layer(torch.ones(1, 4)).sum().backward()
    return "trained"
