"""OSS.load_state_dict empties entries of the dict that the caller passed.

Expected: the state dict is unchanged by loading it: momentum of 1 and 1 parameter(s)
Got: on each rank the entries that the other rank owns are gone
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (no clause: a state dict is read twice)
Issue: none found (searched: fairscale OSS load_state_dict modifies mutates state_dict)
"""

import torch
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the keys of each entry of a state dict before and after it is loaded."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    plain = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    plain.step()
    state = plain.state_dict()
    before = {key: sorted(value) for key, value in state["state"].items()}
    sharded = OSS(parameters, optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    sharded.load_state_dict(state)
    return before, {key: sorted(value) for key, value in state["state"].items()}
