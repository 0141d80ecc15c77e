"""The seam of attention: one call, several ways to compute it.

    attention(q, k, v, causal=True, backend="sdpa")

A model takes the function as an argument and never asks which one it got. Backends: `plain` (the
definition, `solution.attention.plain`) and `sdpa` (PyTorch's fused kernels).

Legend: B batch, H heads, G key/value heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from solution.attention.plain import plain_attention

__all__ = ["BACKENDS", "AttentionFunction", "attention"]


class AttentionFunction(Protocol):
    """What a model asks of attention, whoever computes it."""

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
        backend: "sdpa" or "plain".

    Returns:
        `[batch, heads, seq_q, head_dim]` in q's dtype.

    Raises:
        ValueError: an unknown backend, or shapes that do not fit each other.
    """
    if backend not in BACKENDS:
        raise ValueError(f"expected backend to be one of {sorted(BACKENDS)}, got {backend!r}")
    _check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BACKENDS[backend](q, k, v, causal=causal, scale=scale)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"expected q, k, v of 4 dims [batch, heads, seq, head_dim], {shapes}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"expected k and v of one shape, with q's batch and head_dim, {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"expected the heads of k and v to divide those of q, {shapes}")


def _sdpa(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    *,
    causal: bool,
    scale: float,
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


BACKENDS = {"sdpa": _sdpa, "plain": plain_attention}
