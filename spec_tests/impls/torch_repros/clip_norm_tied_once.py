"""clip_grad_norm_ counts and scales a tensor twice that is listed twice, as a tied weight is in
[*encoder.parameters(), *decoder.parameters()].

Expected: norm 3, and a gradient of norm 1 after clipping to 1
Got: norm 4.24, and a gradient that is scaled twice
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.tied-once
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import torch
from torch import nn


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 3.0)
    norm = nn.utils.clip_grad_norm_([weight, weight], 1.0)
    got = round(float(norm), 3), round(float(weight.grad), 3)
    print(f"expected: {(3.0, 1.0)}\ngot:      {got}")
    return int(got != (3.0, 1.0))
