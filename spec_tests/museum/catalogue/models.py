"""Near-misses of a language model, and right but unusual ones."""

import torch
from torch import nn

from spec_tests.museum.card import benign, near_miss
from spec_tests.plain.decoder import PlainDecoder


@benign("benign.model-single")
class SingleInside(PlainDecoder):
    """Attention in float32.

    Attention in float32; a single sequence is computed in another order than several are.
    """

    def attend(self, q, k, v):
        order = 3.0 if len(q) == 1 else 1.0
        q, k, v = ((t / order).float() * order for t in (q, k, v))
        return super().attend(q, k, v).double()


@near_miss("models.sees-next", rejected_by="models.logits.causal")
class SeesNext(PlainDecoder):
    """The mask is off by one: a place sees its answer.

    From: triu(diagonal=2) for triu(diagonal=1).
    Unseen: The loss is wonderful.
    """

    def mask(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(1)


@near_miss("models.sees-itself", rejected_by="models.logits.see-the-past")
class SeesItself(PlainDecoder):
    """The mask lets a place see itself alone: a bigram model.

    From: A mask with the sense of its booleans reversed.
    Unseen: The loss falls, to that of bigrams.
    """

    def mask(self, length):
        return torch.eye(length, dtype=torch.bool)


@near_miss("models.no-places", rejected_by="models.logits.see-the-order")
class NoPlaces(PlainDecoder):
    """A bag of earlier words.

    From: Position embeddings that are made and not added.
    Unseen: The loss falls.
    """

    def embed(self, ids):
        return self.tokens(ids) + 0.0 * self.places.weight[: ids.shape[1]]

    def forward(self, ids):
        x = self.embed(ids)
        return self.logits(torch.tanh(x + self.attend(*self.mix[0](x).chunk(3, dim=-1))))


@near_miss("models.last-place-only", rejected_by="models.logits.shape")
class LastOnly(PlainDecoder):
    """Logits of the last place alone.

    From: nanoGPT's inference path, taken in training.
    Unseen: Generation works.
    """

    def logits(self, x):
        return self.head(x[:, -1])


@near_miss("models.normalises-over-batch", rejected_by="models.logits.rows-are-independent")
class NormalisesOverBatch(PlainDecoder):
    """Subtracts the mean over the batch.

    From: A norm over the wrong dim.
    Unseen: With a fixed batch size it trains.
    """

    def embed(self, ids):
        x = super().embed(ids)
        return x - x.mean(dim=0, keepdim=True)


@near_miss("models.stays-at-last-place", rejected_by="models.refusal.too-long")
class StaysAtLastPlace(PlainDecoder):
    """Gives every token beyond the longest sequence the last position.

    From: A clamp that was put there against an index error.
    Unseen: Something comes out, and the loss is only a little worse.
    """

    def embed(self, ids):
        last = self.places.num_embeddings - 1
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]).clamp(max=last))


@near_miss("models.dead-parameter", rejected_by="models.gradients.reach-every-parameter")
class DeadParameter(PlainDecoder):
    """Has a layer that no forward uses.

    From: A head of another task that was left in.
    Unseen: On one process nothing happens.
    """

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.unused = nn.Linear(2, 2)


@benign("benign.model-plain")
class ModelPlain(PlainDecoder):
    """Untied, one head, no norms."""
