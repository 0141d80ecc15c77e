"""Near-misses of how attention is called: strides, storage, buffers, autograd, memory, refusals."""

from __future__ import annotations

import functools

import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.attention import PlainAttention, Tensor


def _contiguous_strides(shape):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


@near_miss(
    "attention.reads-do-as-contiguous",
    rejected_by=(
        "attention.layout.strides",
        "attention.layout.strides-without-heads",
        "attention.layout.strides-of-zero",
    ),
)
class ReadsDoAsContiguous(PlainAttention):
    """Reads dO with contiguous strides.

    From: flash-attn issue 355; in the study it survived every usual test.
    Unseen: dO made by `randn` is contiguous.
    """

    def backward(self, saved, do, *rest):
        return super().backward(
            saved, do.as_strided(do.shape, _contiguous_strides(do.shape)), *rest
        )


@near_miss(
    "attention.one-set-of-strides",
    rejected_by=("attention.layout.strides", "attention.layout.expanded-keys"),
)
class OneSetOfStrides(PlainAttention):
    """Reads k and v with the strides of q.

    From: The Triton tutorial asserts that they are the same.
    Unseen: They are, in tests.
    """

    def forward(self, q, k, v, *options):
        k, v = self.misread(q, k, v)
        return super().forward(q, k, v, *options)

    def backward(self, saved, *rest):
        q, k, v, out, lse = saved
        return super().backward((q, *self.misread(q, k, v), out, lse), *rest)

    def misread(self, q, *others):
        return [t.as_strided(q.shape, q.stride()) if t.shape == q.shape else t for t in others]


@near_miss(
    "attention.strides-of-v-from-k",
    rejected_by=("attention.layout.strides", "attention.layout.strides-without-heads"),
)
class StridesOfVFromK(OneSetOfStrides):
    """Reads v with the strides of k.

    From: `stride_kd` for `stride_vd` in one block pointer, in a solution of CS336.
    Unseen: k and v come from projections alike, or from one that is fused.
    """

    def misread(self, q, *others):
        k, v = others
        return k, v.as_strided(v.shape, k.stride()) if k.is_contiguous() else v


@near_miss("attention.gradient-like-strides", rejected_by="attention.layout.expanded-keys")
class GradientLikeStridesOfKeys(PlainAttention):
    """Makes dK and dV with the strides of k and v.

    From: `empty_strided(k.shape, k.stride())`, with strides of zero.
    Unseen: Expanded keys are rare.
    """

    def as_given(self, of, gradient):
        if 0 not in of.stride():
            return super().as_given(of, gradient)
        made = torch.empty(1, dtype=of.dtype, device=of.device).expand_as(of).clone()
        return made.copy_(gradient[:1].expand_as(gradient))


@near_miss("attention.reads-behind-the-tail", rejected_by="attention.layout.what-lies-around")
class ReadsBehindTheTail(PlainAttention):
    """Loads values behind seq_k and multiplies them by zero.

    From: A load without a mask; FlashAttention-3 leaks NaN so.
    Unseen: Behind a fresh tensor lie zeros, or nothing.

    Loads the last tile of keys whole; weights of zero are to hide what does not belong to it.
    """

    def row_block(self, q, k, v, *where):
        acc, m, norm = super().row_block(q, k, v, *where)
        return acc + 0.0 * self.behind, m, norm

    behind: Tensor | float = 0.0

    def forward(self, q, k, v, *options):
        end = v.storage_offset() + (v.shape[2] - 1) * v.stride(2) + v.shape[3] if v.numel() else 0
        size = v.untyped_storage().nbytes() // v.element_size()
        beyond = -v.shape[2] % self.tile_k
        is_there = bool(beyond) and v.numel() > 0 and end + 8 + v.shape[3] <= size
        self.behind = v.as_strided((v.shape[3],), (1,), end + 8) if is_there else 0.0
        return super().forward(q, k, v, *options)


@near_miss(
    "attention.scales-keys-in-place",
    rejected_by=("attention.layout.inputs-are-kept", "attention.layout.one-tensor-thrice"),
)
class ScalesKeysInPlace(PlainAttention):
    """Multiplies the scale into k and divides it out again.

    From: To save one multiplication per score.
    Unseen: The scale is a power of two.
    """

    def forward(self, q, k, v, causal, scale):
        found = super().forward(q, k.detach().mul_(scale or 1.0), v, causal, 1.0 if scale else 0.0)
        k.detach().div_(scale or 1.0)
        return found


@near_miss("attention.leaves-blind-rows", rejected_by="attention.autograd.fills-its-buffers")
class LeavesBlindRows(PlainAttention):
    """Leaves rows that see nothing as the allocator gave them.

    From: `empty_like`, and no program for a tile without work; flash-attn issue 2324.
    Unseen: Fresh memory is zero.
    """

    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        blind = max(0, q.shape[2] - k.shape[2]) if causal else 0
        made = torch.empty_like(out)
        made[:, :, blind:] = out[:, :, blind:]
        return made, lse


@near_miss("attention.tiles-by-turns", rejected_by="attention.autograd.repeatable")
class TilesByTurns(PlainAttention):
    """Sums tiles in an order that changes from call to call.

    From: dQ by atomic additions.
    Unseen: The difference is rounding.

    Sums tiles in another order each time, as programs that race do.
    """

    turn = 0

    def k_tiles(self, num):
        self.turn += 1
        return super().k_tiles(num)[:: -1 if self.turn % 3 == 1 else 1]


@near_miss("attention.tiles-by-batch", rejected_by="attention.autograd.batch-invariant")
class TilesByBatch(PlainAttention):
    """Chooses its tiles by the size of the batch.

    From: An autotuner whose key holds the batch.
    Unseen: The difference is rounding.

    Takes larger tiles where there is less to do in parallel.
    """

    def forward(self, q, k, v, *options):
        self.tile_k = 32 if q.shape[0] > 1 else 64
        return super().forward(q, k, v, *options)


@near_miss("attention.keeps-probabilities", rejected_by="attention.memory.keeps-no-scores")
class KeepsProbabilities(PlainAttention):
    """Keeps the probabilities after the forward.

    From: A tensor kept for a look at the attention map.
    Unseen: The values are right.
    """

    def __call__(self, q, k, v, **options):
        found = super().__call__(q, k, v, **options)
        group = q.shape[-3] // max(1, k.shape[-3]) if q.ndim == 4 else 1
        scores = q.detach() @ k.detach().repeat_interleave(group, -3).mT
        (found[0] if options.get("return_lse") else found).probabilities = scores.softmax(-1)
        return found


@near_miss(
    "attention.materialised",
    rejected_by=("attention.memory.forward-is-linear", "attention.memory.keeps-no-scores"),
)
class Materialised(PlainAttention):
    """Has all scores in memory.

    From: A reference that was to be replaced, under the name of what replaces it.
    Unseen: The values are right.

    The definition, gradients by autograd; rows that see nothing apart.
    """

    def apply(self, *args):
        q, k, v, causal, scale = args
        wide = self.wide(q.dtype)
        heads = self.kv_heads_of(q.shape[1], k.shape[1]).to(q.device)
        s = q.to(wide) @ k.to(wide)[:, heads].mT * scale
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
        blind = ~seen.any(dim=-1)[:, None]
        s = s.masked_fill(~(seen | blind), -torch.inf).masked_fill(blind, 0.0)
        p = s.softmax(dim=-1).masked_fill(blind, 0.0)
        out = (p @ v.to(wide)[:, heads]).to(q.dtype)
        return out, s.logsumexp(dim=-1).masked_fill(blind[:, 0], -torch.inf)


@near_miss("attention.materialises-in-backward", rejected_by="attention.memory.peak-is-linear")
class MaterialisesInBackward(PlainAttention):
    """Makes all scores at once in the backward.

    From: A tiled forward, and a backward that recomputes the whole, as exercises suggest.
    Unseen: The values are right; what the forward keeps is small.
    """

    def backward(self, saved, *rest):
        q, k, *_ = saved
        whole = q @ k[:, self.kv_heads_of(q.shape[1], k.shape[1])].mT
        found = super().backward(saved, *rest)
        return (*found[:2], found[2] + 0.0 * whole[0, 0, 0, 0])


@near_miss("attention.computes-hidden-tiles", rejected_by="attention.causal.skips-hidden-tiles")
class ComputesHiddenTiles(PlainAttention):
    """Computes tiles above the diagonal and masks them.

    From: The mask without the loop bound: twice the work.
    Unseen: The values are right.
    """

    def is_skipped(self, rows, keys, shift):
        return False


@near_miss("attention.unchecked", rejected_by="attention.refusal.bad-input")
class Unchecked(PlainAttention):
    """Checks nothing.

    From: A kernel takes pointers.
    Unseen: Tests pass what fits.
    """

    def check(self, q, k, v):
        pass

    def forward(self, q, k, v, *options):
        if k.shape != v.shape and k.shape[1] == v.shape[1]:
            v = v[:, :, : k.shape[2]]
        return super().forward(q, k, v, *options)


@near_miss("attention.asserts-without-words", rejected_by="attention.refusal.names-the-argument")
class AssertsWithoutWords(PlainAttention):
    """Refuses with a bare assertion.

    From: `assert q.shape == k.shape`.
    Unseen: It is an error, after all.
    """

    def check(self, q, k, v):
        try:
            super().check(q, k, v)
        except ValueError:
            raise AssertionError from None


@near_miss("attention.takes-foreign-pointers", rejected_by="attention.refusal.devices")
class TakesForeignPointers(PlainAttention):
    """Takes k from whatever device it lies on.

    From: A pointer does not say whose it is.
    Unseen: All tensors of a test lie on one.

    Looks at k's device as little as a kernel does.
    """

    def __call__(self, q, k, v, **options):
        foreign = isinstance(q, Tensor) and isinstance(k, Tensor) and k.device != q.device
        return super().__call__(
            q, torch.zeros_like(k, device=q.device) if foreign else k, v, **options
        )


@near_miss("attention.fails-without-work", rejected_by="attention.shapes.empty")
class FailsWithoutWork(PlainAttention):
    """Fails where there is no element.

    From: A grid of zero programs.
    Unseen: Tests have elements.
    """

    def forward(self, q, k, v, *options):
        if not q.numel():
            raise RuntimeError("invalid configuration argument")
        return super().forward(q, k, v, *options)


@near_miss("attention.causal-by-default", rejected_by="attention.causal.off-by-default")
class CausalByDefault(PlainAttention):
    """Masks the future where the caller says nothing about it.

    From: `is_causal=True` in the signature of a public solution.
    Unseen: Tests that pass the flag each time.
    """

    @classmethod
    def functions(cls):
        attend = super().functions()["flash_attention"]
        return {"flash_attention": functools.partial(attend, causal=True)}
