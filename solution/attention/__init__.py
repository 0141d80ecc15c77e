"""The seam of attention: one call, several ways to compute it.

    attention(q, k, v, causal=True, backend="sdpa")

A model takes the function as an argument and never asks which one it got. Backends: `plain` (the
definition, every score in memory), `tiled` (O(N) memory in PyTorch operations,
`solution.attention.tiled`), `triton` (the same in kernels, `solution.attention.triton_kernels`) and
`sdpa` (PyTorch's fused kernels). `unavailable` says why one of them cannot run on a device.

Legend: B batch, H heads, G key/value heads, T tokens, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from solution.attention.flash import TILED, call
from solution.attention.inputs import check, under_autocast
from solution.attention.triton_launch import TRITON
from solution.attention.triton_launch import unavailable as _triton_unavailable


class AttentionFunction(Protocol):
    """The signature that a model expects of any attention."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /, *, causal: bool
    ) -> torch.Tensor:
        """`[B, H, T, D]` and two `[B, G, T, D]` in, `[B, H, T, D]` out."""
        ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    backend: str = "sdpa",
) -> torch.Tensor:
    """Self-attention of a model; the scale is `head_dim ** -0.5`.

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k, v: `[batch, kv_heads, seq, head_dim]`, dtype and device of q; kv_heads divides heads, and
            query head h reads key head `h // (heads // kv_heads)`.
        causal: row i sees keys j <= i.
        backend: one of `BACKENDS`.

    Returns:
        `[batch, heads, seq, head_dim]` in q's dtype.

    Raises:
        ValueError: an unknown backend, one that cannot run here, or inputs that do not fit each
            other.
    """
    q, k, v = under_autocast(q, k, v)
    check(q, k, v)
    if q.ndim != 4 or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"expected q and k of 4 dims with as many tokens, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}; see flash_attention for others"
        )
    if backend not in BACKENDS:
        reasons = {name: unavailable(name, q.device.type) for name in sorted(BACKENDS)}
        words = (f"{name} (not here: {why})" if why else name for name, why in reasons.items())
        raise ValueError(f"expected backend to be {' or '.join(words)}, got {backend!r}")
    return BACKENDS[backend](q, k, v, causal=causal, scale=q.shape[-1] ** -0.5)


def _plain(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """`softmax(q k^T * scale) v`; keeps the scores for the backward, `[B, H, T, T]`."""
    heads_per_key_head = q_BHTD.shape[1] // max(1, k_BGTD.shape[1])
    k_BHTD = k_BGTD.repeat_interleave(heads_per_key_head, dim=1)
    v_BHTD = v_BGTD.repeat_interleave(heads_per_key_head, dim=1)
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-1, -2) * scale
    if causal:
        hidden_TT = scores_BHTT.new_ones(scores_BHTT.shape[-2:], dtype=torch.bool).triu(1)
        scores_BHTT = scores_BHTT.masked_fill(hidden_TT, -torch.inf)
    return torch.softmax(scores_BHTT, dim=-1) @ v_BHTD


def _sdpa(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    has_groups = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, is_causal=causal, scale=scale, enable_gqa=has_groups
    )


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": _sdpa,
    "plain": _plain,
    "tiled": partial(call, TILED, return_lse=False),
    "triton": partial(call, TRITON, return_lse=False),
}


def unavailable(backend: str, device_type: str) -> str | None:
    """Return why `backend` cannot run on tensors of that device; None if it can."""
    return _triton_unavailable(device_type) if backend == "triton" else None
