"""MemTracker raises on a model with a frozen parameter: it registers a hook on every one.

Expected: the memory of a step of a model with a frozen layer
Got: RuntimeError "cannot register a hook on a tensor that doesn't require gradient"
Versions: torch 2.13.0, checked 2026-11-23
Clause: measure.memory.peak
Case: *-frozen
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_tools/mem_tracker.py
"""

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = MemTracker()
    try:
        tracker.track_external(model, optimizer)
        with tracker:
            model(torch.ones(1, 2)).sum().backward()
        got = "a step"
    except RuntimeError as error:
        got = f"{error}"
    print(f"expected: a step\ngot:      {got}")
    return int(got != "a step")
