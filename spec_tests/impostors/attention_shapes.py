"""Near-misses of attention's shapes: tails, heads, batch and head dim."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.attention_values import card
from spec_tests.impostors.plain_attention import PlainAttention, Tensor


class CountsPadding(PlainAttention):
    """The last tile of keys is filled up with zeros, which nothing masks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        missing = -k.shape[-2] % self.tile_k if not options.get("causal") else 0
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (k, v))
        return super().__call__(q, k, v, **options)


class DropsTail(PlainAttention):
    def k_tiles(self, num: int) -> list[range]:
        whole = super().k_tiles(num)
        return [tile for tile in whole if len(tile) == self.tile_k] or whole


class DropsLastRows(PlainAttention):
    def q_tiles(self, num: int) -> list[range]:
        whole = super().q_tiles(num)
        return [tile for tile in whole if len(tile) == self.tile_q] or whole


class WholeTilesOnly(PlainAttention):
    """Refuses lengths that are no multiple of its tile and head dims that are no power of two."""

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        assert q.shape[-2] % 64 == k.shape[-2] % 64 == 0
        assert q.shape[-1] & (q.shape[-1] - 1) == 0


class EqualLengthsOnly(PlainAttention):
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        assert q.shape == k.shape


class Float32Only(PlainAttention):
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        assert q.dtype in (torch.float32, torch.float64)


class HeadsModulo(PlainAttention):
    def kv_heads_of(self, heads: int, kv_heads: int) -> Tensor:
        return torch.arange(heads) % max(1, kv_heads)


class FirstBatchOnly(PlainAttention):
    """The batch offset of the keys is left out: every sequence reads those of the first."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        return super().forward(q, k[:1].expand_as(k), v[:1].expand_as(v), *options)

    def backward(self, saved: Any, *rest: Any) -> Any:
        q, k, v, out, lse = saved
        return super().backward((q, k[:1].expand_as(k), v[:1].expand_as(v), out, lse), *rest)


class HeadDimRoundedDown(PlainAttention):
    """Head dims that are no multiple of eight lose their last columns in the scores."""

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        whole = max(8, q.shape[-1] // 8 * 8)
        return super().scores(q[..., :whole], k[..., :whole], scale)


class PaddedHeadDimInScale(PlainAttention):
    def scale_of(self, scale: float | None, head_dim: int) -> float:
        return (1 << (head_dim - 1).bit_length()) ** -0.5 if scale is None else scale


class FlatOnly(PlainAttention):
    """Takes the middle dim of a 3-D input for heads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if q.ndim == 4:
            return super().__call__(q, k, v, **options)
        found = super().__call__(*(t.transpose(0, 1) for t in (q, k, v)), **options)
        if options.get("return_lse"):
            return tuple(t.transpose(0, 1) for t in found)
        return found.transpose(0, 1)


class HeadDimOf256(PlainAttention):
    """Scores of the first 256 columns: the largest tile there is."""

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return super().scores(q[..., :256], k[..., :256], scale)


IMPOSTORS = (
    card(
        HeadDimOf256,
        "head-dim-of-256",
        "Leaves columns beyond 256 out of the scores.",
        "The last branch of a table of tiles, with no error behind it.",
        "Head dims of 64 and 128.",
        "attention.shapes.large-head-dims",
    ),
    card(
        CountsPadding,
        "counts-padding",
        "Pads the keys to a whole tile and masks none of them.",
        "A load with `other=0` and no mask on the scores.",
        "Lengths that are multiples of the tile.",
        "attention.shapes.ragged-lengths",
    ),
    card(
        DropsTail,
        "drops-tail",
        "Leaves the last keys out where they fill no tile.",
        "`seq_k // BLOCK` for a ceiling.",
        "Lengths that are multiples of the tile.",
        "attention.shapes.ragged-lengths",
    ),
    card(
        DropsLastRows,
        "drops-last-rows",
        "Leaves the last queries out where they fill no tile.",
        "A grid of `seq_q // BLOCK` programs.",
        "Lengths that are multiples of the tile.",
        "attention.shapes.ragged-lengths",
    ),
    card(
        WholeTilesOnly,
        "whole-tiles-only",
        "Refuses lengths that are no multiple of 64 and head dims that are no power of two.",
        "CS336 tests powers of two, so that no kernel needs to look where a tile ends.",
        "Lengths and head dims are powers of two.",
        "attention.shapes.ragged-lengths",
        "attention.shapes.head-dims",
    ),
    card(
        Float32Only,
        "float32-only",
        "Refuses half precision.",
        "A block of float16 is multiplied with one of float32, which Triton refuses.",
        "The course's tests are in float32; models are not.",
        "attention.forward.half-precision",
    ),
    card(
        EqualLengthsOnly,
        "equal-lengths-only",
        "Refuses more or fewer keys than queries, and shared heads.",
        "`assert Q.shape == K.shape`.",
        "Training has equal lengths; decoding has not.",
        "attention.shapes.ragged-lengths",
        "attention.causal.bottom-right",
    ),
    card(
        HeadsModulo,
        "heads-modulo",
        "Query head h reads key head h modulo kv_heads.",
        "`h % kv_heads`, the tiling and not the repeating; NSA-Triton issue 27.",
        "One key head, or as many as query heads.",
        "attention.shapes.grouped-heads",
        "attention.shapes.batch-and-heads-are-independent",
    ),
    card(
        FirstBatchOnly,
        "first-batch-only",
        "Reads the first sequence's keys for all sequences.",
        "A batch offset left out; Triton issue 6242.",
        "The test had a batch of one.",
        "attention.forward.values",
        "attention.shapes.batch-and-heads-are-independent",
    ),
    card(
        HeadDimRoundedDown,
        "head-dim-rounded-down",
        "Leaves out the columns beyond a multiple of eight.",
        "Vector loads of eight.",
        "Head dims of 64 and 128.",
        "attention.shapes.head-dims",
    ),
    card(
        PaddedHeadDimInScale,
        "padded-head-dim-in-scale",
        "Takes the padded head dim for the scale.",
        "`BLOCK_D ** -0.5` inside a kernel.",
        "Head dims that are powers of two.",
        "attention.shapes.head-dims",
    ),
    card(
        FlatOnly,
        "takes-batch-for-heads",
        "Takes sequences of a 3-D input for one another's heads.",
        "A reshape of [batch, seq, dim] to [seq, batch, dim].",
        "A batch of one.",
        "attention.shapes.without-heads",
    ),
)
