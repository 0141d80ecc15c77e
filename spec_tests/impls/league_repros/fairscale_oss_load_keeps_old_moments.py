"""OSS.load_state_dict of a state without moments, such as the first step's, keeps the old moments.

Expected: after loading an empty state no parameter has state
Got: the momentum of before the load is still there
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: zero1.state.load-replaces
Issue: none found (searched: fairscale OSS load_state_dict old state kept; the same fault is in PyTorch's ZeroRedundancyOptimizer)
"""

import torch
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the number of parameters that have state after an empty state was loaded."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(RANKS)]
    sharded = OSS(parameters, optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    sharded.step()
    fresh = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    sharded.load_state_dict(fresh.state_dict())
    kept = [state for state in sharded.optim.state.values() if state]
    return 0, len(kept)
