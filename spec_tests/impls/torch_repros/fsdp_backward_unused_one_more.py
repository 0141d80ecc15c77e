"""Where a rank uses one parameter of a unit more than the others, gloo aborts under FSDP2.

Expected: the mean with zero for the absent, or an error
Got: a process is ended by SIGABRT
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.backward.unused-on-some-ranks
Case: *-one-more
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
RIGHT = ("trained", "raised")


class Branches(nn.Module):
    """Two layers of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Return what the one layer makes, or both."""
        found: torch.Tensor = self.both(self.first(x) if is_first else x)
        return found


def step(rank: int) -> str:
    """Take a step in which the first rank uses both layers."""
    model = fully_shard(Branches())
    model(torch.ones(1, 4), rank == 0).sum().backward()
    return "trained"
