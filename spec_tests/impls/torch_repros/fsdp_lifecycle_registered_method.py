"""A registered method that forward calls frees the weights that forward still computes with.

Expected: the output of the plain model, 2
Got: RuntimeError "got mixed torch.Tensor and DTensor"
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.registered-method
Case: *-forward-calls-method-freed
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

RANKS = 2
EXPECTED = [2.0] * RANKS


class Encoder(nn.Module):
    """A forward that computes on after it called a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ self.weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum that needs the weight again, after the method."""
        return (self.encode(x) @ self.weight).sum()


def observe(rank: int) -> float | str:
    """Return the output, or the error."""
    model = Encoder()
    fully_shard(model, reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    try:
        output = model(torch.ones(1, 1)).detach()
        return float(output)
    except RuntimeError as error:
        return f"{error!s:.90}"
