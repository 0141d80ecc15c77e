"""Near-misses of a language model, and right but unusual ones."""

from spec_tests.museum.card import Source, benign
from spec_tests.plain.decoder import PlainDecoder

DECODER = Source("spec_tests.plain.decoder")


@benign("benign.model-single")
class SingleInside(PlainDecoder):
    """Attention in float32.

    Attention in float32; a single sequence is computed in another order than several are.
    """

    def attend(self, q, k, v):
        order = 3.0 if len(q) == 1 else 1.0
        q, k, v = ((t / order).float() * order for t in (q, k, v))
        return super().attend(q, k, v).double()


DECODER.near_miss(
    "models.sees-next",
    "models.logits.causal",
    "- return torch.ones(length, length, dtype=torch.bool).tril()",
    "+ return torch.ones(length, length, dtype=torch.bool).tril(1)",
    does="The mask is off by one: a place sees its answer.",
    seen="triu(diagonal=2) for triu(diagonal=1).",
    unseen="The loss is wonderful.",
)

DECODER.near_miss(
    "models.sees-itself",
    "models.logits.see-the-past",
    "- return torch.ones(length, length, dtype=torch.bool).tril()",
    "+ return torch.eye(length, dtype=torch.bool)",
    does="The mask lets a place see itself alone: a bigram model.",
    seen="A mask with the sense of its booleans reversed.",
    unseen="The loss falls, to that of bigrams.",
)

DECODER.near_miss(
    "models.no-places",
    "models.logits.see-the-order",
    "- return self.tokens(ids) + self.places.weight[: ids.shape[1]]",
    "+ return self.tokens(ids) + 0.0 * self.places.weight[: ids.shape[1]]",
    "...",
    "- for layer in self.mix:",
    "+ for layer in self.mix[:1]:",
    does="A bag of earlier words.",
    seen="Position embeddings that are made and not added.",
    unseen="The loss falls.",
)

DECODER.near_miss(
    "models.last-place-only",
    "models.logits.shape",
    "- return self.head(x)",
    "+ return self.head(x[:, -1])",
    does="Logits of the last place alone.",
    seen="nanoGPT's inference path, taken in training.",
    unseen="Generation works.",
)

DECODER.near_miss(
    "models.normalises-over-batch",
    "models.logits.rows-are-independent",
    "  x = self.embed(ids)",
    "+ x = x - x.mean(dim=0, keepdim=True)",
    does="Subtracts the mean over the batch.",
    seen="A norm over the wrong dim.",
    unseen="With a fixed batch size it trains.",
)

DECODER.near_miss(
    "models.stays-at-last-place",
    "models.refusal.too-long",
    "- return self.tokens(ids) + self.places.weight[: ids.shape[1]]",
    "+ last = self.places.num_embeddings - 1",
    "+ return self.tokens(ids) + self.places(torch.arange(ids.shape[1]).clamp(max=last))",
    does="Gives every token beyond the longest sequence the last position.",
    seen="A clamp that was put there against an index error.",
    unseen="Something comes out, and the loss is only a little worse.",
)

DECODER.near_miss(
    "models.dead-parameter",
    "models.gradients.reach-every-parameter",
    "  self.head = nn.Linear(width, vocab)",
    "+ self.unused = nn.Linear(2, 2)",
    does="Has a layer that no forward uses.",
    seen="A head of another task that was left in.",
    unseen="On one process nothing happens.",
)

DECODER.benign("benign.model-plain", does="Untied, one head, no norms.")
