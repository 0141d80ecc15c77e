"""Causal scaled_dot_product_attention on a CPU reads keys far beyond what a row sees: a NaN there
reaches it.

Expected: rows that see no NaN are finite
Got: they are NaN: hidden keys are multiplied by weights of zero
Versions: torch 2.13.0, checked 2026-11-23
Clause: attention.causal.skips-hidden-tiles
Known: https://github.com/pytorch/pytorch/issues/101967
"""

import torch
import torch.nn.functional as F


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 1, 400, 16) for _ in range(3))
    k[:, :, 390:], v[:, :, 390:] = float("nan"), float("nan")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    bad = int(out[0, 0, :134].isnan().any(dim=-1).sum())
    print(f"expected: 0 of the rows 0 to 133 hold NaN\ngot:      {bad} of them")
    return int(bad > 0)
