"""DistributedDataParallel broadcasts buffers in the first forward inside no_sync.

Expected: inside no_sync nothing is sent: each rank keeps its own buffer
Got: rank 1 has the buffer of rank 0
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.no-sync.sends-nothing
Case: *-buffers
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
EXPECTED = [0.0, 1.0]


class Marked(nn.Module):
    """A layer and a buffer."""

    mark: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mark", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return self.layer(x)


def observe(rank: int) -> float:
    """Return the buffer, which is the rank's number, after a forward inside no_sync."""
    module = Marked()
    model = DistributedDataParallel(module)
    model(torch.ones(1, 1)).sum().backward()
    module.mark.fill_(rank)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    return float(module.mark)
