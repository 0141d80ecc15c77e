"""OSS.clip_grad_norm remembers which parameters had gradients when it was first called.

Expected: the norm of two gradients of ones of 4 elements each is 2.83
Got: 2.0: the gradient that came after the first call is left out of the norm
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (OSS.clip_grad_norm has no place in the contract)
Issue: none found (searched: fairscale OSS clip_grad_norm _local_params cache wrong norm)
"""

import torch
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the true norm, and what clip_grad_norm returns the second time it is called."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(RANKS)]
    optimizer = OSS(parameters, optim=torch.optim.SGD, lr=0.1)
    parameters[0].grad = torch.ones(4)  # in the first step the second one is not used
    optimizer.clip_grad_norm(1e9)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return round(8**0.5, 3), round(optimizer.clip_grad_norm(1e9).item(), 3)
