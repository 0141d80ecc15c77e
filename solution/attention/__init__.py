"""The seam of attention: one call, several ways to compute it.

    attention(q, k, v, causal=True, backend="sdpa")

A model takes the function as an argument and never asks which one it got. Backends: `plain` (the
definition, `solution.attention.plain`), `tiled` (O(N) memory in PyTorch operations,
`solution.attention.tiled`), `triton` (the same in kernels, `solution.attention.triton_kernels`) and
`sdpa` (PyTorch's fused kernels). `unavailable` says why one of them cannot run on a device.

Legend: B batch, H heads, G key/value heads, Q queries, K keys, D head dim.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from solution.attention.flash import TILED, FlashAttentionTorch, flash_attention
from solution.attention.inputs import as_4d, check, checked_scale, under_autocast
from solution.attention.plain import plain_attention
from solution.attention.triton_launch import TRITON, FlashAttentionTriton, flash_attention_triton
from solution.attention.triton_launch import unavailable as _triton_unavailable

__all__ = [
    "BACKENDS",
    "AttentionFunction",
    "FlashAttentionTorch",
    "FlashAttentionTriton",
    "attention",
    "flash_attention",
    "flash_attention_triton",
    "unavailable",
]


class AttentionFunction(Protocol):
    """The signature that a model expects of any attention."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /, *, causal: bool
    ) -> torch.Tensor:
        """`[B, H, Q, D]` and two `[B, G, K, D]` in, `[B, H, Q, D]` out."""
        ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    backend: str = "sdpa",
) -> torch.Tensor:
    """Scaled dot-product attention.

    Args:
        q: `[batch, heads, seq_q, head_dim]`.
        k, v: `[batch, kv_heads, seq_k, head_dim]`, dtype and device of q; kv_heads divides heads,
            and query head h reads key head `h // (heads // kv_heads)`.
        causal: row i sees keys j <= i + seq_k - seq_q; rows that see nothing give zeros.
        scale: of the scores; None is `head_dim ** -0.5`.
        backend: one of `BACKENDS`.

    Returns:
        `[batch, heads, seq_q, head_dim]` in q's dtype; all may be without heads, 3-D.

    Raises:
        ValueError: an unknown backend, one that cannot run here, or inputs that do not fit each
            other.
    """
    q, k, v = under_autocast(q, k, v)
    check(q, k, v)
    if backend not in BACKENDS:
        raise ValueError(f"expected backend to be {_offered(q.device.type)}, got {backend!r}")
    scale = checked_scale(scale, q.shape[-1])
    out = BACKENDS[backend](as_4d(q), as_4d(k), as_4d(v), causal=causal, scale=scale)
    return out.view(q.shape) if q.ndim == 3 else out


def _sdpa(
    q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    num_blind = q_BHQD.shape[2] - k_BGKD.shape[2]
    if causal and num_blind > 0:
        # The first rows see no key. PyTorch's kernels disagree about them, so they never get there.
        seeing = _sdpa(q_BHQD[:, :, num_blind:], k_BGKD, v_BGKD, causal=True, scale=scale)
        return F.pad(seeing, (0, 0, num_blind, 0))
    is_square = num_blind == 0
    mask_QK = None
    if causal and not is_square:
        # is_causal means top-left to PyTorch: the same thing only where the scores are square.
        ones_QK = q_BHQD.new_ones(q_BHQD.shape[2], k_BGKD.shape[2], dtype=torch.bool)
        mask_QK = ones_QK.tril(diagonal=-num_blind)
    return F.scaled_dot_product_attention(
        q_BHQD,
        k_BGKD,
        v_BGKD,
        attn_mask=mask_QK,
        is_causal=causal and is_square,
        scale=scale,
        enable_gqa=q_BHQD.shape[1] != k_BGKD.shape[1],
    )


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": _sdpa,
    "plain": plain_attention,
    "tiled": lambda q, k, v, *, causal, scale: TILED.forward(q, k, v, causal, scale)[0],
    "triton": lambda q, k, v, *, causal, scale: TRITON.forward(q, k, v, causal, scale)[0],
}


def _offered(device_type: str) -> str:
    """Each backend, and why it cannot run on tensors of that device if it cannot."""
    reasons = {name: unavailable(name, device_type) for name in sorted(BACKENDS)}
    return " or ".join(f"{n} (not here: {why})" if why else n for n, why in reasons.items())


def unavailable(backend: str, device_type: str) -> str | None:
    """Return why `backend` cannot run on tensors of that device; None if it can."""
    return _triton_unavailable(device_type) if backend == "triton" else None
