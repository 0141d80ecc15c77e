"""scaled_dot_product_attention on a CPU gives zeros where all scores of a row are NaN.

Expected: the row of the output is NaN
Got: zeros, with fewer keys than a vector has lanes
Versions: torch 2.13.0, checked 2026-11-26
Clause: attention.forward.nan-comes-out
Case: flash_attention-*-q-of-four-keys
See: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp
"""

import torch
import torch.nn.functional as F


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 1, 4, 16) for _ in range(3))
    q[:, :, 2] = float("nan")
    row = F.scaled_dot_product_attention(q, k, v)[0, 0, 2]
    print(f"expected: 16 elements are NaN\ngot:      {int(row.isnan().sum())} are")
    return int(not row.isnan().all())
