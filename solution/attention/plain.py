"""Attention by its definition, every score in memory: the oracle of the faster ones.

    out = softmax(q k^T * scale, over the keys that a query may see) v

Written to be read and to be right, in any dtype and at any length. It keeps the scores,
`[B, H, Q, K]`, for the backward: at 1024 tokens and 12 heads 50 MB per sequence and layer in fp32.

Causal is aligned bottom-right: query i of Q sees keys j <= i + K - Q, so that the last query sees
all keys (a cache of K - Q earlier keys needs no other mask). A query that sees nothing (Q > K)
gives zeros and gets zero gradients, never NaN.

Legend: B batch, H heads, G key/value heads, Q queries, K keys, D head dim.
"""

import torch


def plain_attention(
    q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """`softmax(q k^T * scale) v`, `[B, H, Q, D]` in q's dtype; head h reads key head h // (H/G)."""
    heads_per_key_head = q_BHQD.shape[1] // max(1, k_BGKD.shape[1])
    k_BHKD = k_BGKD.repeat_interleave(heads_per_key_head, dim=1)
    v_BHKD = v_BGKD.repeat_interleave(heads_per_key_head, dim=1)
    scores_BHQK = q_BHQD @ k_BHKD.transpose(-1, -2) * scale
    if not causal:
        return torch.softmax(scores_BHQK, dim=-1) @ v_BHKD
    hidden_QK = _hidden(q_BHQD.shape[2], k_BGKD.shape[2], q_BHQD.device)
    probabilities_BHQK = torch.softmax(scores_BHQK.masked_fill(hidden_QK, -torch.inf), dim=-1)
    # A row of nothing but -inf is 0/0; the fill makes its value and its gradient zero.
    blind_Q1 = hidden_QK.all(dim=-1, keepdim=True)
    return probabilities_BHQK.masked_fill(blind_Q1, 0.0) @ v_BHKD


def _hidden(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """True where a query must not see a key: strictly above the bottom-right diagonal."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return everything.triu(diagonal=1 + num_keys - num_queries)
