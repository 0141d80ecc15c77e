"""clip_grad_norm_ of bfloat16 gradients has eight bits, also where gradients of float32 are
beside them.

Expected: the norm with the range and rounding of float32
Got: a number with eight bits
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.dtypes
Case: *two
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import torch
from torch import nn


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    weights = [
        nn.Parameter(torch.zeros(65, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)
    ]
    for weight in weights:
        weight.grad = torch.full_like(weight, 10_001.0)
    expected = float(torch.cat([weight.grad.double() for weight in weights]).norm())
    got = float(nn.utils.clip_grad_norm_(weights, float("inf")))
    print(f"expected: {expected}\ngot:      {got}")
    return int(not abs(got / expected - 1) < 1e-5)
