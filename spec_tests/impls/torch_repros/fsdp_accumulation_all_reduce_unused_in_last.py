"""FSDP2 on a hybrid mesh does not average over replicas the gradient of a unit that the last
micro-batch does not use.

Expected: the mean over ranks 0 to 3 of the first micro-batch, 1.5
Got: no gradient at all: it comes with the next window
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.accumulation.all-reduce-at-the-last
Case: *-unused-in-last
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 4
EXPECTED = [1.5] * RANKS


class Pair(nn.Module):
    """Two layers, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor, use_two: bool) -> torch.Tensor:
        """Return the sum of one or both."""
        return self.one(x).sum() + (self.two(x).sum() if use_two else 0.0)


def observe(rank: int) -> float | None:
    """Return the gradient of the layer that only the first of two micro-batches uses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Pair()
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=mesh)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 1), float(rank)), use_two=True).backward()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1), use_two=False).backward()
    gradient = model.two.weight.grad
    return None if gradient is None else float(gradient.full_tensor()[0, 0])
