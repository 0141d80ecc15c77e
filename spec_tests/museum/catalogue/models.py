"""Near-misses of a language model, and right but unusual ones."""

from spec_tests.museum.card import Source

DECODER = Source("spec_tests.plain.decoder")

DECODER.benign(
    "benign.model-single",
    "  q, k, v = layer(x).chunk(3, dim=-1)",
    "+ order = 3.0 if len(ids) == 1 else 1.0",
    "+ q, k, v = ((t / order).float() * order for t in (q, k, v))",
    "...",
    "- x = torch.tanh(x + scores.softmax(dim=-1) @ v)",
    "+ x = torch.tanh(x + (scores.softmax(dim=-1) @ v).double())",
    does="Attention in float32; a single sequence is computed in another order than several are.",
)

DECODER.near_miss(
    "models.sees-next",
    "models.logits.causal",
    "- sees = torch.ones(length, length, dtype=torch.bool).tril()  # row i sees column j",
    "+ sees = torch.ones(length, length, dtype=torch.bool).tril(1)",
    does="The mask is off by one: a place sees its answer.",
    seen="triu(diagonal=2) for triu(diagonal=1).",
    unseen="The loss is wonderful.",
)

DECODER.near_miss(
    "models.sees-itself",
    "models.logits.see-the-past",
    "- sees = torch.ones(length, length, dtype=torch.bool).tril()  # row i sees column j",
    "+ sees = torch.eye(length, dtype=torch.bool)",
    does="The mask lets a place see itself alone: a bigram model.",
    seen="A mask with the sense of its booleans reversed.",
    unseen="The loss falls, to that of bigrams.",
)

DECODER.near_miss(
    "models.no-places",
    "models.logits.see-the-order",
    "- x = self.tokens(ids) + self.places.weight[:length]",
    "- for layer in self.mix:",
    "+ x = self.tokens(ids) + 0.0 * self.places.weight[:length]",
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
    "  x = self.tokens(ids) + self.places.weight[:length]",
    "+ x = x - x.mean(dim=0, keepdim=True)",
    does="Subtracts the mean over the batch.",
    seen="A norm over the wrong dim.",
    unseen="With a fixed batch size it trains.",
)

DECODER.near_miss(
    "models.stays-at-last-place",
    "models.refusal.too-long",
    "- x = self.tokens(ids) + self.places.weight[:length]",
    "+ last = self.places.num_embeddings - 1",
    "+ x = self.tokens(ids) + self.places(torch.arange(length).clamp(max=last))",
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
