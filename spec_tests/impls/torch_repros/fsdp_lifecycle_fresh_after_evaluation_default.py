"""FSDP2 computes with the root's stale weights after backward, evaluation and step.

Expected: the output of the weights after the step, [0, 0]
Got: the output of the weights before the step, [1, 1]
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.fresh-after-evaluation
Case: *-default
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[0.0, 0.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the output after a step that takes the weights from ones to zeros."""
    layer = nn.Linear(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    model = fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 1)
    model(x).sum().backward()  # the gradient is 1 everywhere
    with torch.no_grad():
        model(x)  # leaves the root unsharded
    optimizer.step()
    output: list[float] = model(x).flatten().tolist()
    return output
