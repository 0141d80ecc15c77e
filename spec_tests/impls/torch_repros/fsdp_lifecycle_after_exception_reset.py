"""After an interrupted backward, reset_iter_state and zero_grad, FSDP2 adds the failed step's
gradients to the next step's.

Expected: the mean over the two ranks, 1.5
Got: the failed step's 100 are added, 101.5
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.after-exception
Case: *-backward-reset
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
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


def observe(rank: int) -> float:
    """Return the second layer's gradient in a clean step after an interrupted backward."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    fully_shard(model)
    sharded = model[1].weight
    handle = model[0].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    with contextlib.suppress(KeyError):
        model(torch.full((1, 1), 100.0)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return float(sharded.grad.full_tensor())
