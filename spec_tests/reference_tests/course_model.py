"""A fixture: a GPT-2 small that needs the memory whose peaks a course has published.

The course prints 15,619, 30,224 and 58,438 MB for batches of 8, 16 and 32 sequences of 1024, and
batch 64 does not fit on 80 GB. These are the peaks of *its* model and none of what GPT-2 needs:

- scores of attention are materialised, scaled, masked, normalised and dropped out one by one;
- dropout of 0.1, also on embeddings and the two projections;
- checkpointing keeps the outputs of all products, those of scores with them: the matrix of
  T x T, the largest tensor of a layer, is what its policy saves;
- logits live on in a variable during the backward;
- a mask of 1024 x 1024 booleans in every layer.

For predictions only; nothing here is trained. From batch 16 on the course's script had a second
model alive, 475 MB, which is part of what it printed.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

__all__ = ["OUT_OF_MEMORY_AT", "PUBLISHED_MIB", "SECOND_MODEL_MIB", "CourseModel"]

PUBLISHED_MIB = {8: 15_619, 16: 30_224, 32: 58_438}
OUT_OF_MEMORY_AT = 64
SECOND_MODEL_MIB = 475
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
DROPOUT = 0.1
_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class CourseModel(nn.Module):
    """ids `[batch, seq]` -> logits `[batch, seq, vocab]`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.tokens(ids) + self.positions(places), DROPOUT, self.training)
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(self.norm(x))


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> Any:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class _Block(nn.Module):
    def __init__(self, e: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(e), nn.LayerNorm(e)
        self.qkv, self.out = nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.up, self.down = nn.Linear(e, 4 * e), nn.Linear(4 * e, e)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self._attend(self.attention_norm(x)), DROPOUT, self.training)
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), DROPOUT, self.training)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        length = x.shape[1]
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        seen: Any = self.mask
        scores = torch.where(seen[:length, :length], scores, torch.finfo(scores.dtype).min)
        weights = F.dropout(scores.softmax(dim=-1), DROPOUT, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
