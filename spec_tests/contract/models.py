"""The contract of what one rank computes: attention and a language model."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import torch
from torch import nn


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in O(N) memory. `flash_attention_triton` is the same in Triton kernels.

    q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_k, head_dim]`; 3-D is
    `[batch, seq, head_dim]` without heads. All sizes from one on are taken, in any strides; head
    dims above 256, and float64, may be refused with an error. `scale` is any number and defaults to
    `head_dim ** -0.5`. Causal is aligned bottom-right: row i sees keys j <= i + seq_k - seq_q.
    Query head h reads key head `h // (heads // kv_heads)`.

    A row of the output depends on its own query alone, and on the keys and values that it sees.
    Output has q's dtype; the LSE is natural, float32 (float64 for float64), `[batch, heads,
    seq_q]`, and either differentiable or marked non-differentiable. Sums are float32 in every
    dtype, so that results are as good as one rounding; at level production products of float32
    keep its 24 bits, on tensor cores as well. Rows that see nothing give zeros, -inf, and zero
    gradients.

    The forward makes no matrix of scores and keeps none; at level production neither does the
    backward. Inputs stay as they are. What the backward needs is saved as autograd asks, so that a
    change of it in place is noticed. First derivatives only: a second one, and the transforms of
    torch.func, are right or an error.

    At level production inputs that do not fit (dtypes, devices, shapes) are a ValueError that names
    the argument, and sizes of zero give empty results, or those of rows that see nothing.
    """


flash_attention_triton = flash_attention


def language_model(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embedding_dim: int,
    max_sequence_length: int,
) -> nn.Module:
    """A decoder: ids `[batch, seq]` -> logits `[batch, seq, vocab]`, `seq` up to the longest.

    The logits at a place depend on the ids up to and at it, and on their order; not on later ones,
    and not on the other sequences of the batch. The module takes `.double()` and `.eval()`; what
    it computes in float32 all the same is no error.
    """
