"""Attend aligns a causal mask otherwise with flash=True than with flash=False, given fewer keys.

Expected: the same output from both: the first of 3 queries sees no key of 2, the last sees both
Got: with flash=True the first query sees the first key: aligned top-left, not bottom-right
Versions: x-transformers 2.31.10, torch 2.13.0, checked 2026-11-23
Clause: attention.causal.gradients-bottom-right, attention.blind-rows.gradients
Issue: none found (searched: x-transformers Attend flash causal mask fewer keys than queries alignment)
"""

import torch
from x_transformers.attend import Attend


def observe() -> tuple[object, object]:
    """Return the last two rows of both outputs, those that see a key in either alignment."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4)
    plain, _ = Attend(causal=True, flash=False)(q, k, v)
    flash, _ = Attend(causal=True, flash=True)(q, k, v)
    return [[round(x, 4) for x in row] for row in plain[0, 0, 1:].tolist()], [
        [round(x, 4) for x in row] for row in flash[0, 0, 1:].tolist()
    ]


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    expected, got = observe()
    print(f"expected: {expected}\ngot:      {got}")
    return int(expected != got)
