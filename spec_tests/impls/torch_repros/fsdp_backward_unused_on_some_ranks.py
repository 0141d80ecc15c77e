"""In FSDP2 parameters of one unit that only some ranks use get the gradients of one another.

Expected: the mean with zero for the absent: 0.5 for the first layer, 1 for the second
Got: each rank has 1.5, the mean over both layers, under the name that it used, and None elsewhere
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.backward.unused-on-some-ranks
Case: *-one-each
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[0.5, 1.0]] * RANKS


class Branches(nn.Module):
    """One layer for each rank; both are in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 2, bias=False) for _ in range(RANKS))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        """Return the output of one layer."""
        found: torch.Tensor = self.layers[used](x)
        return found


def observe(rank: int) -> list[float | None]:
    """Return the gradients of this rank's part of both layers: inputs are 1, and 2."""
    model = fully_shard(Branches())
    model(torch.full((1, 1), rank + 1.0), rank).sum().backward()
    gradients = [layer.weight.grad for layer in model.layers]
    return [None if g is None else g.to_local().mean().item() for g in gradients]
