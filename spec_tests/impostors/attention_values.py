"""Near-misses of attention's values: the softmax, the scale, the sums, the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_attention import PlainAttention, Tensor, offer


class NoRescaleOfSum(PlainAttention):
    def rescaled_acc(self, acc: Tensor, rescale: Tensor) -> Tensor:
        return acc


class NoRescaleOfNormaliser(PlainAttention):
    def rescaled_norm(self, norm: Tensor, rescale: Tensor) -> Tensor:
        return norm


class MaximumFromZero(PlainAttention):
    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(like), torch.zeros_like(like)


class NoMaximum(PlainAttention):
    def maximum(self, m: Tensor, s: Tensor) -> Tensor:
        return torch.zeros_like(m)


class MaximumTimesScale(PlainAttention):
    """max(q k) * scale: with a negative scale that is the smallest score."""

    _scale = 1.0

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        self._scale = scale
        return super().scores(q, k, scale)

    def maximum(self, m: Tensor, s: Tensor) -> Tensor:
        largest = s.amin(dim=-1) if self._scale < 0 else s.amax(dim=-1)
        return torch.maximum(m, largest)


class EpsilonInNormaliser(PlainAttention):
    def normalised(self, acc: Tensor, norm: Tensor) -> Tensor:
        return acc / (norm[..., None] + 1e-6)


class ScaleIgnored(PlainAttention):
    def scale_of(self, scale: float | None, head_dim: int) -> float:
        return head_dim**-0.5


class ScaleZeroIsDefault(PlainAttention):
    def scale_of(self, scale: float | None, head_dim: int) -> float:
        return scale or head_dim**-0.5


class ScalesKeysInTheirDtype(PlainAttention):
    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return self.dot(q, (k * scale).transpose(-1, -2))


class NarrowSums(PlainAttention):
    def k_tiles(self, num: int) -> list[range]:
        return [range(i, min(i + self.tile_k, num)) for i in range(0, num, self.tile_k)]

    def added(self, acc: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        return (acc + product).to(dtype).to(acc.dtype)


class NarrowScores(PlainAttention):
    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        s = super().scores(q, k, scale)
        return s.to(q.dtype).to(s.dtype)


class Base2Lse(PlainAttention):
    def lse_of(self, m: Tensor, norm: Tensor) -> Tensor:
        return super().lse_of(m, norm) / 0.6931471805599453

    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, *where: Any) -> Tensor:
        return super().probabilities(q, k, lse * 0.6931471805599453, *where)


class LseInDtype(PlainAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = super().__call__(q, k, v, **options)
        return (found[0], found[1].to(q.dtype)) if options.get("return_lse") else found


class ReturnsMaximum(PlainAttention):
    """The saved statistic is the row's maximum, the backward has the normaliser elsewhere."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = super().__call__(q, k, v, **options)
        if not options.get("return_lse"):
            return found
        group = q.shape[-3] // k.shape[-3]
        s = q.float() @ k.repeat_interleave(group, -3).float().transpose(-1, -2)
        return found[0], (s * self.scale_of(options.get("scale"), q.shape[-1])).amax(dim=-1)


class Float32Output(PlainAttention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = super().__call__(q, k, v, **options)
        return (found[0].float(), found[1]) if options.get("return_lse") else found.float()


def card(
    variant: type[PlainAttention],
    words: str,
    does: str,
    seen: str,
    unseen: str,
    *rejected_by: str,
) -> Impostor:
    """The card of a variant."""
    return Impostor(
        f"attention.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(variant)
    )


IMPOSTORS = (
    card(
        NoRescaleOfSum,
        "sum-not-rescaled",
        "Does not rescale the running sum of p v when the maximum moves.",
        "The line `acc *= alpha` forgotten: the first bug of most online softmaxes.",
        "One tile of keys never moves it.",
        "attention.forward.values",
        "attention.gradients.values",
        "attention.laws.changes-of-keys",
    ),
    card(
        NoRescaleOfNormaliser,
        "normaliser-not-rescaled",
        "Does not rescale the normaliser when the maximum moves.",
        "The other half of the same line.",
        "Inputs near zero: the factor is near one.",
        "attention.forward.values",
        "attention.forward.lse",
        "attention.laws.doubled-keys",
    ),
    card(
        MaximumFromZero,
        "maximum-from-zero",
        "Starts the running maximum at zero and not at -inf.",
        "`zeros` for `full(-inf)`; in the study 17 of 29 mutants lived on, this among them.",
        "N(0, 1) inputs have a positive score in every row.",
        "attention.forward.large-logits",
        "attention.gradients.large-logits",
    ),
    card(
        NoMaximum,
        "no-maximum",
        "Subtracts no maximum.",
        "softmax as in a textbook.",
        "exp of small scores does not overflow.",
        "attention.forward.large-logits",
        "attention.laws.between-extremes",
    ),
    card(
        MaximumTimesScale,
        "maximum-times-scale",
        "Takes max(q k) times the scale for the maximum.",
        "The Triton tutorial's `tl.max(qk) * qk_scale`.",
        "The scale is positive, or the scores lie within 128 binades.",
        "attention.forward.negative-scale-wide-logits",
    ),
    card(
        EpsilonInNormaliser,
        "epsilon-in-normaliser",
        "Adds 1e-6 to the normaliser.",
        "A guard against rows that see nothing.",
        "Over hundreds of keys it is nothing.",
        "attention.shapes.one-of-each",
        "attention.causal.first-row",
    ),
    card(
        ScaleIgnored,
        "scale-ignored",
        "Ignores a scale that is given.",
        "`sm_scale = 1 / sqrt(D)` inside the wrapper.",
        "Tests leave the scale to its default.",
        "attention.forward.scale",
        "attention.gradients.scale",
    ),
    card(
        ScaleZeroIsDefault,
        "scale-zero-is-default",
        "Takes a scale of zero for none.",
        "`scale or head_dim ** -0.5`.",
        "Nobody passes zero, until a schedule begins there.",
        "attention.forward.scale",
        "attention.gradients.scale-zero",
    ),
    card(
        ScalesKeysInTheirDtype,
        "scales-keys-in-their-dtype",
        "Multiplies the scale into the keys, in the keys' dtype.",
        "The Triton tutorial bakes scale and log2(e) into a half-precision operand.",
        "The output passes any test of the largest error; L is off by 50 times its rounding.",
        "attention.forward.lse",
    ),
    card(
        NarrowSums,
        "narrow-sums",
        "Sums p v in the inputs' dtype.",
        "An accumulator without `dtype=float32`.",
        "The largest error doubles; tests allow that.",
        "attention.gradients.long-sums",
    ),
    card(
        NarrowScores,
        "narrow-scores",
        "Rounds the scores to the inputs' dtype.",
        "`torch.matmul` of two bfloat16 matrices, then softmax in float32.",
        "As good as a plain attempt, which is what it is compared with.",
        "attention.forward.half-precision",
        "attention.forward.lse",
    ),
    card(
        Base2Lse,
        "base-2-lse",
        "Returns the log-sum-exp to base two.",
        "PyTorch issue 181645: kernels compute in base two, and L leaked.",
        "The backward divides by it again; nobody looks at L itself.",
        "attention.forward.lse-values",
        "attention.forward.lse",
        "attention.forward.equal-keys",
        "attention.laws.split-keys-merge",
    ),
    card(
        LseInDtype,
        "lse-in-dtype",
        "Returns the log-sum-exp in q's dtype.",
        "`.to(q.dtype)` over all outputs.",
        "In float32 it is the same.",
        "attention.forward.lse",
        "attention.blind-rows.zeros",
    ),
    card(
        ReturnsMaximum,
        "returns-maximum",
        "Returns the row's maximum for the log-sum-exp.",
        "Two statistics, m and L, under one name.",
        "The backward has the right one.",
        "attention.forward.lse-values",
        "attention.forward.lse",
        "attention.laws.split-keys-merge",
        "attention.laws.doubled-keys",
    ),
    card(
        Float32Output,
        "float32-output",
        "Returns float32 whatever q is.",
        "The accumulator stored as it is.",
        "A comparison that casts both sides.",
        "attention.forward.half-precision",
        "attention.blind-rows.zeros",
    ),
)
