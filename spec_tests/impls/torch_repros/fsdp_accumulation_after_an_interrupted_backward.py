"""In FSDP2 a backward that raised leaves a gradient in the root that the model's zero_grad misses.

Expected: the gradient of the root's bias in the step after it, [1, 1]
Got: [2, 2]: the root shows full parameters still, and the shard keeps what is unreduced
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.accumulation.after-an-interrupted-backward
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [[1.0, 1.0]] * RANKS


def raises(*_: object) -> None:
    """Raise, as a hook of the backward that runs out of memory would."""
    raise KeyError("planted")


def observe(rank: int) -> list[float]:
    """Return the gradient of the root's bias after a step that a failed one came before."""
    model: Any = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    bias = model[1].bias
    handle = model[0].register_forward_hook(lambda m, x, out: out.register_hook(raises) and None)
    loss = model(torch.ones(1, 1)).sum()
    handle.remove()
    with contextlib.suppress(KeyError):
        loss.backward()
    getattr(model, "reset_iter_state", lambda: None)()
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    gradient: list[float] = bias.grad.full_tensor().tolist()
    return gradient
