"""FSDP2 cannot train after a first forward under torch.inference_mode().

Expected: a training step after the evaluation gives gradients
Got: RuntimeError "Inplace update to inference tensor outside InferenceMode"
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.forward.evaluation-leaves-no-trace
Case: *-inference-first
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = ["trained"] * RANKS


def observe(rank: int) -> str:
    """Return how the first training step after an evaluation ends."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return f"{error!s:.70}"
    return "trained"
