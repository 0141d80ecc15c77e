"""A plain, right decoder with its decisions in methods, and near-misses that override one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spec_tests.impostors.card import Functions, Impostor


class PlainDecoder(nn.Module):
    """Embeddings, two layers of masked attention of one head each, a head that is not tied."""

    def __init__(self, vocab: int, longest: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(longest, width)
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.mix:
            x = torch.tanh(x + self.attend(*layer(x).chunk(3, dim=-1)))
        return self.logits(x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.places.weight[: ids.shape[1]]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask(q.shape[1]), float("-inf"))
        return scores.softmax(dim=-1) @ v

    def mask(self, length: int) -> torch.Tensor:
        """True where row i may see column j."""
        return torch.ones(length, length, dtype=torch.bool).tril()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class SingleInside(PlainDecoder):
    """Attention in float32; a single sequence is computed in another order than several are."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        order = 3.0 if len(q) == 1 else 1.0
        q, k, v = ((t / order).float() * order for t in (q, k, v))
        return super().attend(q, k, v).double()


class SeesNext(PlainDecoder):
    def mask(self, length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril(1)


class SeesItself(PlainDecoder):
    def mask(self, length: int) -> torch.Tensor:
        return torch.eye(length, dtype=torch.bool)


class NoPlaces(PlainDecoder):
    """One layer and no positions: a bag of earlier words."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + 0.0 * self.places.weight[: ids.shape[1]]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.logits(torch.tanh(x + self.attend(*self.mix[0](x).chunk(3, dim=-1))))


class LastOnly(PlainDecoder):
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, -1])


class NormalisesOverBatch(PlainDecoder):
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(ids)
        return x - x.mean(dim=0, keepdim=True)


class StaysAtLastPlace(PlainDecoder):
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        last = self.places.num_embeddings - 1
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]).clamp(max=last))


class DeadParameter(PlainDecoder):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.unused = nn.Linear(2, 2)


def _offer(model: type[PlainDecoder]) -> Functions:
    def language_model(*, vocab_size: int, **sizes: Any) -> nn.Module:
        return model(vocab_size, sizes["max_sequence_length"], sizes["embedding_dim"])

    return {"language_model": language_model}


def _card(
    model: type[PlainDecoder], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    return Impostor(words, does, seen, unseen, rejected_by, functions=lambda: _offer(model))


IMPOSTORS = (
    _card(
        LastOnly,
        "models.last-place-only",
        "Logits of the last place alone.",
        "nanoGPT's inference path, taken in training.",
        "Generation works.",
        "models.logits.shape",
    ),
    _card(
        SeesNext,
        "models.sees-next",
        "The mask is off by one: a place sees its answer.",
        "triu(diagonal=2) for triu(diagonal=1).",
        "The loss is wonderful.",
        "models.logits.causal",
    ),
    _card(
        SeesItself,
        "models.sees-itself",
        "The mask lets a place see itself alone: a bigram model.",
        "A mask with the sense of its booleans reversed.",
        "The loss falls, to that of bigrams.",
        "models.logits.see-the-past",
    ),
    _card(
        NoPlaces,
        "models.no-places",
        "A bag of earlier words.",
        "Position embeddings that are made and not added.",
        "The loss falls.",
        "models.logits.see-the-order",
    ),
    _card(
        NormalisesOverBatch,
        "models.normalises-over-batch",
        "Subtracts the mean over the batch.",
        "A norm over the wrong dim.",
        "With a fixed batch size it trains.",
        "models.logits.rows-are-independent",
    ),
    _card(
        DeadParameter,
        "models.dead-parameter",
        "Has a layer that no forward uses.",
        "A head of another task that was left in.",
        "On one process nothing happens.",
        "models.gradients.reach-every-parameter",
    ),
    _card(
        StaysAtLastPlace,
        "models.stays-at-last-place",
        "Gives every token beyond the longest sequence the last position.",
        "A clamp that was put there against an index error.",
        "Something comes out, and the loss is only a little worse.",
        "models.refusal.too-long",
    ),
    _card(PlainDecoder, "benign.model-plain", "Untied, one head, no norms.", "", ""),
    _card(SingleInside, "benign.model-single", "Attention in float32.", "", ""),
)
