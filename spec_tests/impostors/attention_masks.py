"""Near-misses of attention's mask: where it begins, what hides, and rows that see nothing."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.attention_values import card
from spec_tests.impostors.plain_attention import PlainAttention, Tensor


class CausalTopLeft(PlainAttention):
    def visible(self, rows: range, keys: range, shift: int) -> Tensor:
        return super().visible(rows, keys, 0)

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return super().is_skipped(rows, keys, 0)


class CausalStrict(PlainAttention):
    def visible(self, rows: range, keys: range, shift: int) -> Tensor:
        return super().visible(rows, keys, shift - 1)


class CausalOneAhead(PlainAttention):
    def visible(self, rows: range, keys: range, shift: int) -> Tensor:
        return super().visible(rows, keys, shift + 1)


class SkipsOneTile(PlainAttention):
    """The last tile of each row is a loop bound that rounds down."""

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return keys.stop > rows[-1] + shift + 1 and keys.start > rows[0] + shift - self.tile_k

    def is_skipped_backward(self, rows: range, keys: range, shift: int) -> bool:
        return PlainAttention.is_skipped(self, rows, keys, shift)


class MasksWithMillion(PlainAttention):
    """-1e6 for -inf: rows that see nothing become the mean of V."""

    def masked(self, s: Tensor, rows: range, keys: range, shift: int) -> Tensor:
        return s.masked_fill(~self.visible(rows, keys, shift), -1e6)

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return False


class MasksByAdding(PlainAttention):
    """Adds -1e4 to hidden scores: large ones come through."""

    penalty = 1e4

    def masked(self, s: Tensor, rows: range, keys: range, shift: int) -> Tensor:
        return s - self.penalty * (~self.visible(rows, keys, shift)).to(s.dtype)

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return False


class MasksByAddingMore(MasksByAdding):
    """Adds -1e6, which larger scores still survive."""

    penalty = 1e6


class BlindIsNan(PlainAttention):
    def safe(self, m: Tensor) -> Tensor:
        return m

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return False

    def normalised(self, acc: Tensor, norm: Tensor) -> Tensor:
        return acc / norm[..., None]


class CausalIgnored(PlainAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return super().__call__(q, k, v, **{**options, "causal": False})


class BlindIsZeroLse(PlainAttention):
    """Adds an epsilon to the normaliser, so that its logarithm is finite."""

    def lse_of(self, m: Tensor, norm: Tensor) -> Tensor:
        return self.safe(m) + torch.log(norm + 1e-30)


IMPOSTORS = (
    card(
        CausalIgnored,
        "causal-ignored",
        "Takes the flag and ignores it.",
        "CS336 allows it in the version without Triton, where 10 of 25 leave it so.",
        "The course tests that version without the mask.",
        "attention.causal.equal-lengths",
    ),
    card(
        CausalTopLeft,
        "causal-top-left",
        "Aligns the causal mask at the first query.",
        "PyTorch's own convention; flash-attn before 2.1.",
        "Equal lengths: there it is the same.",
        "attention.causal.bottom-right",
        "attention.causal.gradients-bottom-right",
    ),
    card(
        CausalStrict,
        "causal-strict",
        "Hides the diagonal too.",
        "`>` for `>=`.",
        "The loss still falls.",
        "attention.causal.first-row",
        "attention.causal.equal-lengths",
    ),
    card(
        CausalOneAhead,
        "causal-one-ahead",
        "Sees one key of the future.",
        "`<=` on an index that was already shifted.",
        "The loss falls faster than ever.",
        "attention.causal.prefix",
        "attention.causal.hidden-keys-do-not-matter",
    ),
    card(
        SkipsOneTile,
        "skips-one-tile",
        "Skips the tile on the diagonal for some lengths.",
        "A loop bound rounded down where seq_k - seq_q is no multiple of the tile.",
        "Lengths that are multiples of the tile.",
        "attention.shapes.ragged-lengths",
    ),
    card(
        MasksWithMillion,
        "masks-with-a-million",
        "Masks with -1e6 for -inf.",
        "The constant of the Triton tutorial and of CS336's handout.",
        "Rows that see nothing do not occur with equal lengths.",
        "attention.blind-rows.zeros",
        "attention.blind-rows.gradients",
    ),
    card(
        MasksByAddingMore,
        "masks-by-adding-more",
        "Adds -1e6 to hidden scores.",
        "What the exercise of CS336 says.",
        "No score of a trained model comes near it.",
        "attention.causal.hidden-keys-of-any-size",
    ),
    card(
        MasksByAdding,
        "masks-by-adding",
        "Adds -1e4 to hidden scores.",
        "BERT's mask.",
        "Scores are small, so they stay below it.",
        "attention.causal.hidden-keys-do-not-matter",
        "attention.blind-rows.zeros",
    ),
    card(
        BlindIsNan,
        "blind-is-nan",
        "Divides zero by zero in rows that see nothing.",
        "exp(-inf - (-inf)); PyTorch issue 41508.",
        "Rows that see nothing do not occur with equal lengths.",
        "attention.blind-rows.zeros",
        "attention.shapes.empty",
    ),
    card(
        BlindIsZeroLse,
        "blind-lse-is-finite",
        "Keeps the logarithm finite with an epsilon: L of a blind row is -69.",
        "`log(l + 1e-30)`.",
        "O is right; only who merges by L is lost.",
        "attention.blind-rows.zeros",
        "attention.shapes.empty",
    ),
)
