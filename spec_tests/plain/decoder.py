"""A decoder-only language model, as small as the contract allows.

Problem: predict each token from those before it, for all places of a sequence in one pass.

Idea: embed tokens and places; let each place attend to itself and to earlier ones; map to logits.

Steps
    1. x = tokens + places; a sequence longer than the table of places is an error.
    2. Two layers x = tanh(x + attention(x)), one head each, masked above the diagonal.
    3. Logits by a matrix that is not tied to the embedding. There are no norms and no dropout.

Use
    logits = PlainDecoder(vocab=256, longest=64, width=32)(ids)     # [B, T, 256] of [B, T]

Cost: O(layers * length^2 * width) operations, with all scores in memory.

Paper: Vaswani et al. 2017; Radford et al. 2018.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PlainDecoder(nn.Module):
    """Embeddings, two layers of masked attention of one head each, a head that is not tied."""

    def __init__(self, vocab: int, longest: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(longest, width)
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        sees = torch.ones(length, length, dtype=torch.bool).tril()  # row i sees column j
        x = self.tokens(ids) + self.places.weight[:length]
        for layer in self.mix:
            q, k, v = layer(x).chunk(3, dim=-1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(~sees, float("-inf"))
            x = torch.tanh(x + scores.softmax(dim=-1) @ v)
        return self.head(x)

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class of models."""

        def language_model(*, vocab_size: int, **sizes: Any) -> nn.Module:
            return cls(vocab_size, sizes["max_sequence_length"], sizes["embedding_dim"])

        return {"language_model": language_model}
