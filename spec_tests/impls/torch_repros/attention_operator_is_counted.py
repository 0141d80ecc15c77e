"""FlopCounterMode counts scaled_dot_product_attention on a CPU as nothing.

Expected: two products forward: 4 * batch * heads * seq * seq * head_dim operations
Got: 0
Versions: torch 2.13.0, checked 2026-11-23
Clause: attention.operator.is-counted
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/flop_counter.py
"""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    q, k, v = (torch.randn(1, 4, 64, 16) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, k, v)
    expected, got = 4 * 4 * 64 * 64 * 16, counter.get_total_flops()
    print(f"expected: {expected}\ngot:      {got}")
    return int(got != expected)
