"""clip_grad_norm_ of float16 gradients is infinite beyond 65504: the norm has the gradient's
dtype.

Expected: the norm with the range and rounding of float32
Got: inf, and all gradients are scaled to zero
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.dtypes
Case: *float16
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import torch
from torch import nn


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    weights = [nn.Parameter(torch.zeros(65, dtype=dtype)) for dtype in (torch.float16,)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 10_001.0)
    expected = float(torch.cat([weight.grad.double() for weight in weights]).norm())
    got = float(nn.utils.clip_grad_norm_(weights, float("inf")))
    print(f"expected: {expected}\ngot:      {got}")
    return int(not abs(got / expected - 1) < 1e-5)
