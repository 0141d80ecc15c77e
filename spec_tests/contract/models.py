"""The contract of what one rank computes: attention and a language model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class FlashAttention(Protocol):
    """Exact attention in O(N) memory. `flash_attention_triton` has the same shape.

    q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_k, head_dim]`; 3-D is
    `[batch, seq, head_dim]` without heads. `scale` defaults to `head_dim ** -0.5`. Causal is
    aligned bottom-right: row i sees keys j <= i + seq_k - seq_q. Query head h reads key head
    `h // (heads // kv_heads)`. Output has q's dtype; the LSE is natural, float32 (float64 for
    float64), `[batch, heads, seq_q]`, and either differentiable or marked non-differentiable.
    Rows that see nothing give zeros, -inf, and zero gradients. First derivatives only.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


class LanguageModel(Protocol):
    """A decoder: ids `[batch, seq]` -> logits `[batch, seq, vocab]`, `seq` up to the longest.

    The logits at a place depend on the ids up to and at it, and on their order; not on later ones,
    and not on the other sequences of the batch. The module takes `.double()` and `.eval()`; what
    it computes in float32 all the same is no error.
    """

    def __call__(
        self,
        *,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        embedding_dim: int,
        max_sequence_length: int,
    ) -> nn.Module: ...
