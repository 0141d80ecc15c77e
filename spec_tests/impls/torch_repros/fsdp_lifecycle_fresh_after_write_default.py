"""FSDP2 ignores an in-place write to the root's sharded parameters after an evaluation.

Expected: the output of the weights that were written, [0, 0]
Got: the output of the weights before, [1, 1]
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.fresh-after-load
Case: *-default-written-[pl]*
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[0.0, 0.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the output after zeros were written over the weights, which were ones."""
    layer = nn.Linear(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    model = fully_shard(layer)
    parameters = list(model.parameters())
    x = torch.ones(1, 1)
    with torch.no_grad():
        model(x)
        for parameter in parameters:
            parameter.zero_()
        output: list[float] = model(x).flatten().tolist()
    return output
