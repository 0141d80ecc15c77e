"""FSDP2 makes a dataclass among the inputs anew, and the code of its class runs a second time.

Expected: the output 2: the class doubles what it is given, once
Got: 4
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.forward.containers-of-ones-own
Case: *-computing-dataclass
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [2.0] * RANKS


@dataclass
class Doubled:
    """An input whose class computes."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = 2 * self.x


class Layer(nn.Linear):
    """Takes it."""

    def forward(self, box: Doubled) -> torch.Tensor:  # type: ignore[override]  # a container
        """Return what the layer makes of the doubled input."""
        return super().forward(box.x)


def observe(rank: int) -> float:
    """Return the output of a layer of ones for a one that is doubled."""
    layer = Layer(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    output: torch.Tensor = fully_shard(layer)(Doubled(torch.ones(1, 1, requires_grad=True)))
    return output.detach().mean().item()
