"""x-transformers, behind the contract: `Attend`, and a decoder as a language model.

    the contract     x-transformers
    flash_attention  attend.Attend(flash=True), which calls torch's attention
    language_model   TransformerWrapper around a Decoder, with its default of learned positions

`Attend` takes 4-D tensors and returns no log-sum-exp; its softmax is left in float32.
"""

from __future__ import annotations

import torch
from torch import nn
from x_transformers import Decoder, TransformerWrapper
from x_transformers.attend import Attend


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    """`Attend` for as many heads, without dropout."""
    if return_lse:
        raise NotImplementedError("x-transformers' Attend returns no log-sum-exp")
    if q.ndim == 3:
        found = flash_attention(*(t.unsqueeze(1) for t in (q, k, v)), causal=causal, scale=scale)
        return found.squeeze(1)
    attend = Attend(causal=causal, heads=q.shape[1], scale=scale, flash=True, dropout=0.0)
    num_kv, size = k.shape[1], q.shape[1] // max(k.shape[1], 1)
    out, _ = attend(_exchanged(q, num_kv, size), k, v)
    return _exchanged(out, size, num_kv)


def _exchanged(heads: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Return the heads with the two dims exchanged that they are made of.

    The query heads of a group are next to each other in the contract; `Attend` deals them out in
    turns: its head h reads key head h % kv_heads.
    """
    return heads.unflatten(1, (outer, inner)).transpose(1, 2).flatten(1, 2)


def language_model(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embedding_dim: int,
    max_sequence_length: int,
) -> nn.Module:
    """A decoder of these sizes."""
    return TransformerWrapper(
        num_tokens=vocab_size,
        max_seq_len=max_sequence_length,
        attn_layers=Decoder(
            dim=embedding_dim,
            depth=num_layers,
            heads=num_heads,
            attn_dim_head=embedding_dim // num_heads,
            attn_flash=True,
        ),
    )
