"""scaled_dot_product_attention with enable_gqa sums dV over the query heads of a group in
bfloat16 on a CPU.

Expected: dV is summed in float32 and rounded once, a relative error of at most 2**-8
Got: nearly twice that
Versions: torch 2.13.0, checked 2026-11-23
Clause: attention.shapes.grouped-sums-are-wide
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

import torch
import torch.nn.functional as F


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    torch.manual_seed(7)
    q, do = (torch.randn(2, 32, 20, 16, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 1, 24, 16, dtype=torch.bfloat16) for _ in range(2))
    wide = v.double().requires_grad_()
    weights = (q.double() @ k.double().mT / 4).softmax(dim=-1)
    (weights @ wide).backward(do.double())
    v.requires_grad_()
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True).backward(do)
    assert v.grad is not None
    assert wide.grad is not None
    error = float((v.grad.double() - wide.grad).norm() / wide.grad.norm())
    print(f"expected: at most {2**-8:.5f}\ngot:      {error:.5f}")
    return int(error > 2**-8)
