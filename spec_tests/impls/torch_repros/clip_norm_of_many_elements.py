"""clip_grad_norm_ of a large float32 gradient lacks 2e-5 of itself on a CPU (0.3 % at 38 million
elements).

Expected: the norm, right to one in a million
Got: 2e-5 of it are missing
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.norm.of-many-elements
See: https://docs.pytorch.org/docs/stable/generated/torch.linalg.vector_norm.html
"""

import torch
from torch import nn


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(2**21))
    weight.grad = torch.randn(2**21, generator=torch.Generator().manual_seed(7))
    expected = float(weight.grad.double().norm())
    got = float(nn.utils.clip_grad_norm_([weight], float("inf")))
    print(f"expected: {expected}\ngot:      {got}, {got / expected - 1:.1e} of it off")
    return int(abs(got / expected - 1) > 1e-6)
