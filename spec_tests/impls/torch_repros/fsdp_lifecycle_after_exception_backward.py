"""After an interrupted backward FSDP2 never again reduces units whose inputs need no gradient.

Expected: the mean over the two ranks, 1.5
Got: no gradient
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.after-exception
Case: *-backward
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.5] * RANKS


def fail(*args: Any) -> None:
    """Stand for an error in the backward, such as a lack of memory."""
    raise KeyError


def observe(rank: int) -> float | None:
    """Return the first layer's gradient in a clean step after an interrupted backward."""
    layers = [fully_shard(nn.Linear(1, 1, bias=False)) for _ in range(3)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = fully_shard(nn.Sequential(*layers))
    sharded = layers[0].weight
    handle = layers[1].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    with contextlib.suppress(KeyError):
        model(torch.full((1, 1), 100.0)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return None if sharded.grad is None else float(sharded.grad.full_tensor())
