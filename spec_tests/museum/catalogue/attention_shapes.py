"""Near-misses of causal masks, shapes and layouts."""

import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.attention import PlainAttention


@near_miss(
    "attention.causal-top-left",
    rejected_by=("attention.causal.bottom-right", "attention.causal.gradients-bottom-right"),
)
class CausalTopLeft(PlainAttention):
    """Aligns the causal mask at the first query.

    From: PyTorch's own convention; flash-attn before 2.1.
    Unseen: Equal lengths: there it is the same.
    """

    def visible(self, rows, keys, shift):
        return super().visible(rows, keys, 0)

    def is_skipped(self, rows, keys, shift):
        return super().is_skipped(rows, keys, 0)


@near_miss(
    "attention.causal-strict",
    rejected_by=("attention.causal.first-row", "attention.causal.equal-lengths"),
)
class CausalStrict(PlainAttention):
    """Hides the diagonal too.

    From: `>` for `>=`.
    Unseen: The loss still falls.
    """

    def visible(self, rows, keys, shift):
        return super().visible(rows, keys, shift - 1)


@near_miss(
    "attention.causal-one-ahead",
    rejected_by=("attention.causal.prefix", "attention.causal.hidden-keys-do-not-matter"),
)
class CausalOneAhead(PlainAttention):
    """Sees one key of the future.

    From: `<=` on an index that was already shifted.
    Unseen: The loss falls faster than ever.
    """

    def visible(self, rows, keys, shift):
        return super().visible(rows, keys, shift + 1)


@near_miss(
    "attention.masks-by-adding",
    rejected_by=("attention.causal.hidden-keys-do-not-matter", "attention.blind-rows.zeros"),
)
class MasksByAdding(PlainAttention):
    """Adds -1e4 to hidden scores.

    From: BERT's mask.
    Unseen: Scores are small, so they stay below it.
    """

    penalty = 1e4

    def masked(self, s, rows, keys, shift):
        return s - self.penalty * (~self.visible(rows, keys, shift)).to(s.dtype)

    def is_skipped(self, rows, keys, shift):
        return False


@near_miss("attention.masks-by-adding-more", rejected_by="attention.causal.hidden-keys-of-any-size")
class MasksByAddingMore(MasksByAdding):
    """Adds -1e6 to hidden scores.

    From: What the exercise of CS336 says.
    Unseen: No score of a trained model comes near it.
    """

    penalty = 1e6


@near_miss("attention.causal-ignored", rejected_by="attention.causal.equal-lengths")
class CausalIgnored(PlainAttention):
    """Takes the flag and ignores it.

    From: CS336 allows it in the version without Triton, where 10 of 25 leave it so.
    Unseen: The course tests that version without the mask.
    """

    def __call__(self, q, k, v, **options):
        return super().__call__(q, k, v, **{**options, "causal": False})


@near_miss("attention.counts-padding", rejected_by="attention.shapes.ragged-lengths")
class CountsPadding(PlainAttention):
    """Pads the keys to a whole tile and masks none of them.

    From: A load with `other=0` and no mask on the scores.
    Unseen: Lengths that are multiples of the tile.
    """

    def __call__(self, q, k, v, **options):
        missing = -k.shape[-2] % self.tile_k if not options.get("causal") else 0
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (k, v))
        return super().__call__(q, k, v, **options)


@near_miss(
    "attention.counts-padding-without-backward",
    rejected_by="attention.shapes.lengths-of-the-forward",
)
class CountsPaddingWithoutBackward(CountsPadding):
    """Likewise, and its backward raises.

    From: `assert NotImplementedError(...)` in place of a backward, in a solution of CS336.
    Unseen: What compares outputs after a backward sees the backward raise, and nothing else.
    """

    def backward(self, *args):
        raise RuntimeError("returned an incorrect number of gradients")


@near_miss("attention.drops-tail", rejected_by="attention.shapes.ragged-lengths")
class DropsTail(PlainAttention):
    """Leaves the last keys out where they fill no tile.

    From: `seq_k // BLOCK` for a ceiling.
    Unseen: Lengths that are multiples of the tile.
    """

    def k_tiles(self, num):
        whole = super().k_tiles(num)
        return [tile for tile in whole if len(tile) == self.tile_k] or whole


@near_miss(
    "attention.whole-tiles-only",
    rejected_by=("attention.shapes.ragged-lengths", "attention.shapes.head-dims"),
)
class WholeTilesOnly(PlainAttention):
    """Refuses lengths that are no multiple of 64 and head dims that are no power of two.

    From: CS336 tests powers of two, so that no kernel needs to look where a tile ends.
    Unseen: Lengths and head dims are powers of two.
    """

    def check(self, q, k, v):
        super().check(q, k, v)
        assert q.shape[-2] % 64 == k.shape[-2] % 64 == 0
        assert q.shape[-1] & (q.shape[-1] - 1) == 0


@near_miss(
    "attention.equal-lengths-only",
    rejected_by=("attention.shapes.ragged-lengths", "attention.causal.bottom-right"),
)
class EqualLengthsOnly(PlainAttention):
    """Refuses more or fewer keys than queries, and shared heads.

    From: `assert Q.shape == K.shape`.
    Unseen: Training has equal lengths; decoding has not.
    """

    def check(self, q, k, v):
        super().check(q, k, v)
        assert q.shape == k.shape


@near_miss("attention.float32-only", rejected_by="attention.forward.half-precision")
class Float32Only(PlainAttention):
    """Refuses half precision.

    From: A block of float16 is multiplied with one of float32, which Triton refuses.
    Unseen: The course's tests are in float32; models are not.
    """

    def check(self, q, k, v):
        super().check(q, k, v)
        assert q.dtype in (torch.float32, torch.float64)


@near_miss(
    "attention.heads-modulo",
    rejected_by=(
        "attention.shapes.grouped-heads",
        "attention.shapes.batch-and-heads-are-independent",
    ),
)
class HeadsModulo(PlainAttention):
    """Query head h reads key head h modulo kv_heads.

    From: `h % kv_heads`, the tiling and not the repeating; NSA-Triton issue 27.
    Unseen: One key head, or as many as query heads.
    """

    def kv_heads_of(self, heads, kv_heads):
        return torch.arange(heads) % max(1, kv_heads)


@near_miss("attention.groups-by-shifts", rejected_by="attention.shapes.grouped-heads")
class GroupsByShifts(PlainAttention):
    """Shifts where it should divide by the size of a group.

    From: sizes that are powers of two, and an optimisation for them.
    Unseen: Groups of one, two, four and eight heads.
    """

    def kv_heads_of(self, heads, kv_heads):
        size = max(1, heads // max(1, kv_heads))
        return (torch.arange(heads) >> (size.bit_length() - 1)).clamp(max=max(0, kv_heads - 1))


@near_miss("attention.nan-is-blind", rejected_by="attention.forward.nan-comes-out")
class NanIsBlind(PlainAttention):
    """Gives zeros to rows whose normaliser is no number.

    From: `nan_to_num` at the end, for rows that see nothing; PyTorch's kernel for the CPU.
    Unseen: Healthy runs have no NaN.
    """

    def normalised(self, acc, norm):
        return super().normalised(acc, norm).nan_to_num(0.0)


@near_miss(
    "attention.first-batch-only",
    rejected_by=("attention.forward.values", "attention.shapes.batch-and-heads-are-independent"),
)
class FirstBatchOnly(PlainAttention):
    """Reads the first sequence's keys for all sequences.

    From: A batch offset left out; Triton issue 6242.
    Unseen: The test had a batch of one.
    """

    def forward(self, q, k, v, *options):
        return super().forward(q, k[:1].expand_as(k), v[:1].expand_as(v), *options)

    def backward(self, saved, *rest):
        q, k, v, out, lse = saved
        return super().backward((q, k[:1].expand_as(k), v[:1].expand_as(v), out, lse), *rest)


@near_miss("attention.head-dim-rounded-down", rejected_by="attention.shapes.head-dims")
class HeadDimRoundedDown(PlainAttention):
    """Leaves out the columns beyond a multiple of eight.

    From: Vector loads of eight.
    Unseen: Head dims of 64 and 128.
    """

    def scores(self, q, k, scale):
        whole = max(8, q.shape[-1] // 8 * 8)
        return super().scores(q[..., :whole], k[..., :whole], scale)


@near_miss("attention.takes-batch-for-heads", rejected_by="attention.shapes.without-heads")
class FlatOnly(PlainAttention):
    """Takes sequences of a 3-D input for one another's heads.

    From: A reshape of [batch, seq, dim] to [seq, batch, dim].
    Unseen: A batch of one.
    """

    def __call__(self, q, k, v, **options):
        if q.ndim == 4:
            return super().__call__(q, k, v, **options)
        found = super().__call__(*(t.transpose(0, 1) for t in (q, k, v)), **options)
        if options.get("return_lse"):
            return tuple(t.transpose(0, 1) for t in found)
        return found.transpose(0, 1)


@near_miss("attention.head-dim-of-256", rejected_by="attention.shapes.large-head-dims")
class HeadDimOf256(PlainAttention):
    """Leaves columns beyond 256 out of the scores.

    From: The last branch of a table of tiles, with no error behind it.
    Unseen: Head dims of 64 and 128.
    """

    def scores(self, q, k, scale):
        return super().scores(q[..., :256], k[..., :256], scale)
