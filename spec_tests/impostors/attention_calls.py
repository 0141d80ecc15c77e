"""Near-misses of how attention is called: strides, storage, buffers, autograd, memory, refusals."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.attention_values import card
from spec_tests.impostors.plain_attention import PlainAttention, Tensor


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


class ReadsDoAsContiguous(PlainAttention):
    def backward(self, saved: Any, do: Tensor, *rest: Any) -> Any:
        return super().backward(
            saved, do.as_strided(do.shape, _contiguous_strides(do.shape)), *rest
        )


class OneSetOfStrides(PlainAttention):
    """Reads k and v with the strides of q where their shapes agree."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        k, v = self.misread(q, k, v)
        return super().forward(q, k, v, *options)

    def backward(self, saved: Any, *rest: Any) -> Any:
        q, k, v, out, lse = saved
        return super().backward((q, *self.misread(q, k, v), out, lse), *rest)

    def misread(self, q: Tensor, *others: Tensor) -> list[Tensor]:
        return [t.as_strided(q.shape, q.stride()) if t.shape == q.shape else t for t in others]


class GradientLikeStridesOfKeys(PlainAttention):
    """Makes dK and dV with the strides of k and v, zeros among them."""

    def as_given(self, of: Tensor, gradient: Tensor) -> Tensor:
        if 0 not in of.stride():
            return super().as_given(of, gradient)
        made = torch.empty(1, dtype=of.dtype, device=of.device).expand_as(of).clone()
        return made.copy_(gradient[:1].expand_as(gradient))


class ReadsBehindTheTail(PlainAttention):
    """Loads the last tile of keys whole; weights of zero are to hide what does not belong to it."""

    def row_block(
        self, q: Tensor, k: Tensor, v: Tensor, *where: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        acc, m, norm = super().row_block(q, k, v, *where)
        return acc + 0.0 * self.behind, m, norm

    behind: Tensor | float = 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        end = v.storage_offset() + (v.shape[2] - 1) * v.stride(2) + v.shape[3] if v.numel() else 0
        size = v.untyped_storage().nbytes() // v.element_size()
        beyond = -v.shape[2] % self.tile_k
        is_there = bool(beyond) and v.numel() > 0 and end + 8 + v.shape[3] <= size
        self.behind = v.as_strided((v.shape[3],), (1,), end + 8) if is_there else 0.0
        return super().forward(q, k, v, *options)


class ScalesKeysInPlace(PlainAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        found = super().forward(q, k.detach().mul_(scale or 1.0), v, causal, 1.0 if scale else 0.0)
        k.detach().div_(scale or 1.0)
        return found


class Rows32Bit(PlainAttention):
    """Offsets of rows are 32-bit, those of batch and head are not."""

    wrapped = (2,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        return super().forward(q, self.misread(k), v, *options)

    def misread(self, t: Tensor) -> Tensor:
        offsets = torch.zeros(t.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if t.numel() and (size - 1) * stride >= 2**31 and dim in self.wrapped:
                of_dim = torch.arange(size) * stride % 2**31
                offsets += of_dim.view([-1 if d == dim else 1 for d in range(t.ndim)])
            else:
                offsets += (torch.arange(size) * stride).view(
                    [-1 if d == dim else 1 for d in range(t.ndim)]
                )
        if not t.numel() or (t.shape[2] - 1) * t.stride(2) < 2**31:
            return t
        flat = t.as_strided((2**31 + 2**15,), (1,))
        return flat[offsets.flatten()].view(t.shape)


class LeavesBlindRows(PlainAttention):
    """Writes no rows that see nothing: no program runs for them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        out, lse = super().forward(q, k, v, causal, scale)
        blind = max(0, q.shape[2] - k.shape[2]) if causal else 0
        made = torch.empty_like(out)
        made[:, :, blind:] = out[:, :, blind:]
        return made, lse


class TilesByTurns(PlainAttention):
    """Sums tiles in another order each time, as programs that race do."""

    turn = 0

    def k_tiles(self, num: int) -> list[range]:
        self.turn += 1
        return super().k_tiles(num)[:: -1 if self.turn % 3 == 1 else 1]


class TilesByBatch(PlainAttention):
    """Takes larger tiles where there is less to do in parallel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        self.tile_k = 32 if q.shape[0] > 1 else 64
        return super().forward(q, k, v, *options)


class KeepsProbabilities(PlainAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = super().__call__(q, k, v, **options)
        group = q.shape[-3] // max(1, k.shape[-3]) if q.ndim == 4 else 1
        scores = q.detach() @ k.detach().repeat_interleave(group, -3).mT
        (found[0] if options.get("return_lse") else found).probabilities = scores.softmax(-1)
        return found


class Materialised(PlainAttention):
    """The definition, gradients by autograd; rows that see nothing apart."""

    def apply(self, *args: Any) -> tuple[Tensor, Tensor]:
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


class MaterialisesInBackward(PlainAttention):
    def backward(self, saved: Any, *rest: Any) -> Any:
        q, k, *_ = saved
        whole = q @ k[:, self.kv_heads_of(q.shape[1], k.shape[1])].mT
        found = super().backward(saved, *rest)
        return (*found[:2], found[2] + 0.0 * whole[0, 0, 0, 0])


class ComputesHiddenTiles(PlainAttention):
    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        return False


class Unchecked(PlainAttention):
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        if k.shape != v.shape and k.shape[1] == v.shape[1]:
            v = v[:, :, : k.shape[2]]
        return super().forward(q, k, v, *options)


class AssertsWithoutWords(PlainAttention):
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        try:
            super().check(q, k, v)
        except ValueError:
            raise AssertionError from None


class TakesForeignPointers(PlainAttention):
    """Looks at k's device as little as a kernel does."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        foreign = isinstance(q, Tensor) and isinstance(k, Tensor) and k.device != q.device
        return super().__call__(
            q, torch.zeros_like(k, device=q.device) if foreign else k, v, **options
        )


class FailsWithoutWork(PlainAttention):
    """A grid of zero programs is an error."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        if not q.numel():
            raise RuntimeError("invalid configuration argument")
        return super().forward(q, k, v, *options)


IMPOSTORS = (
    card(
        ReadsDoAsContiguous,
        "reads-do-as-contiguous",
        "Reads dO with contiguous strides.",
        "flash-attn issue 355; in the study it survived every usual test.",
        "dO made by `randn` is contiguous.",
        "attention.layout.strides",
        "attention.layout.strides-without-heads",
        "attention.layout.strides-of-zero",
    ),
    card(
        OneSetOfStrides,
        "one-set-of-strides",
        "Reads k and v with the strides of q.",
        "The Triton tutorial asserts that they are the same.",
        "They are, in tests.",
        "attention.layout.strides",
        "attention.layout.expanded-keys",
    ),
    card(
        GradientLikeStridesOfKeys,
        "gradient-like-strides",
        "Makes dK and dV with the strides of k and v.",
        "`empty_strided(k.shape, k.stride())`, with strides of zero.",
        "Expanded keys are rare.",
        "attention.layout.expanded-keys",
    ),
    card(
        ReadsBehindTheTail,
        "reads-behind-the-tail",
        "Loads values behind seq_k and multiplies them by zero.",
        "A load without a mask; FlashAttention-3 leaks NaN so.",
        "Behind a fresh tensor lie zeros, or nothing.",
        "attention.layout.what-lies-around",
    ),
    card(
        ScalesKeysInPlace,
        "scales-keys-in-place",
        "Multiplies the scale into k and divides it out again.",
        "To save one multiplication per score.",
        "The scale is a power of two.",
        "attention.layout.inputs-are-kept",
        "attention.layout.one-tensor-thrice",
    ),
    card(
        Rows32Bit,
        "rows-of-32-bits",
        "Forms row offsets with 32 bits.",
        "SageAttention issue 386: batch and head were widened, rows were not.",
        "It takes two thousand million elements.",
        "attention.layout.offsets-of-64-bits",
    ),
    card(
        LeavesBlindRows,
        "leaves-blind-rows",
        "Leaves rows that see nothing as the allocator gave them.",
        "`empty_like`, and no program for a tile without work; flash-attn issue 2324.",
        "Fresh memory is zero.",
        "attention.autograd.fills-its-buffers",
    ),
    card(
        TilesByTurns,
        "tiles-by-turns",
        "Sums tiles in an order that changes from call to call.",
        "dQ by atomic additions.",
        "The difference is rounding.",
        "attention.autograd.repeatable",
    ),
    card(
        TilesByBatch,
        "tiles-by-batch",
        "Chooses its tiles by the size of the batch.",
        "An autotuner whose key holds the batch.",
        "The difference is rounding.",
        "attention.autograd.batch-invariant",
    ),
    card(
        KeepsProbabilities,
        "keeps-probabilities",
        "Keeps the probabilities after the forward.",
        "A tensor kept for a look at the attention map.",
        "The values are right.",
        "attention.memory.keeps-no-scores",
    ),
    card(
        Materialised,
        "materialised",
        "Has all scores in memory.",
        "A reference that was to be replaced, under the name of what replaces it.",
        "The values are right.",
        "attention.memory.forward-is-linear",
        "attention.memory.keeps-no-scores",
    ),
    card(
        MaterialisesInBackward,
        "materialises-in-backward",
        "Makes all scores at once in the backward.",
        "A tiled forward, and a backward that recomputes the whole, as exercises suggest.",
        "The values are right; what the forward keeps is small.",
        "attention.memory.peak-is-linear",
    ),
    card(
        ComputesHiddenTiles,
        "computes-hidden-tiles",
        "Computes tiles above the diagonal and masks them.",
        "The mask without the loop bound: twice the work.",
        "The values are right.",
        "attention.causal.skips-hidden-tiles",
    ),
    card(
        Unchecked,
        "unchecked",
        "Checks nothing.",
        "A kernel takes pointers.",
        "Tests pass what fits.",
        "attention.refusal.bad-input",
    ),
    card(
        AssertsWithoutWords,
        "asserts-without-words",
        "Refuses with a bare assertion.",
        "`assert q.shape == k.shape`.",
        "It is an error, after all.",
        "attention.refusal.names-the-argument",
    ),
    card(
        TakesForeignPointers,
        "takes-foreign-pointers",
        "Takes k from whatever device it lies on.",
        "A pointer does not say whose it is.",
        "All tensors of a test lie on one.",
        "attention.refusal.devices",
    ),
    card(
        FailsWithoutWork,
        "fails-without-work",
        "Fails where there is no element.",
        "A grid of zero programs.",
        "Tests have elements.",
        "attention.shapes.empty",
    ),
)
