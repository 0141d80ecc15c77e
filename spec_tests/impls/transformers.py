"""Transformers by Hugging Face, behind the contract: SDPA attention, GPT-2 as a language model.

    the contract     Transformers
    flash_attention  integrations.sdpa_attention.sdpa_attention_forward
    language_model   AutoModelForCausalLM.from_config of a GPT-2 without dropout

What its models pass along is passed along: a mask where queries and keys differ in number, aligned
bottom-right; the number of groups as an attribute of the layer. The log-sum-exp is not offered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    """The attention function of a layer with these heads, its output with the heads in front."""
    if return_lse:
        raise NotImplementedError("Transformers' attention returns no log-sum-exp")
    if q.ndim == 3:
        found = flash_attention(*(t.unsqueeze(1) for t in (q, k, v)), causal=causal, scale=scale)
        return found.squeeze(1)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    mask = None
    if causal and num_queries != num_keys:
        ones = q.new_ones(1, 1, num_queries, num_keys, dtype=torch.bool)
        mask = ones.tril(num_keys - num_queries)
    layer: Any = _Layer(q.shape[1] // k.shape[1] if k.shape[1] else 1)
    out, _ = sdpa_attention_forward(
        layer, q, k, v, mask, dropout=0.0, scaling=scale, is_causal=causal
    )
    return out.transpose(1, 2)


class _Layer:
    """What the attention function asks of its layer."""

    def __init__(self, num_key_value_groups: int) -> None:
        self.num_key_value_groups = num_key_value_groups


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(input_ids=ids, use_cache=False).logits


def language_model(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embedding_dim: int,
    max_sequence_length: int,
) -> nn.Module:
    """GPT-2 of these sizes."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=max_sequence_length,
        n_embd=embedding_dim,
        n_layer=num_layers,
        n_head=num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _Logits(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
