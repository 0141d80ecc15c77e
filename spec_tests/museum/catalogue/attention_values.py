"""Near-misses of attention's values: the softmax, the scale, the sums, the log-sum-exp."""

import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.attention import PlainAttention


@near_miss("attention.finite-sentinel", rejected_by="attention.forward.scores-far-below-zero")
class FiniteSentinel(PlainAttention):
    """Begins the running maximum at -5e4.

    From: flashinfer pull request 4401.
    Unseen: Scores of real models are hundreds at most.
    """

    def start(self, like):
        _, norm = super().start(like)
        return torch.full_like(like, -5e4), norm


@near_miss("attention.rescales-by-a-diagonal", rejected_by="attention.forward.rows-are-apart")
class RescalesByDiagonal(PlainAttention):
    """Rescales the rows of a tile by a product with a diagonal matrix.

    From: `torch.diag(factors) @ acc`, in two solutions of CS336: the paper writes it so.
    Unseen: Nobody tests with NaN, and all finite numbers are right.
    """

    def rescaled_acc(self, acc, rescale):
        return torch.diag_embed(rescale) @ acc


@near_miss(
    "attention.sum-not-rescaled",
    rejected_by=(
        "attention.forward.values",
        "attention.gradients.values",
        "attention.laws.changes-of-keys",
    ),
)
class NoRescaleOfSum(PlainAttention):
    """Does not rescale the running sum of p v when the maximum moves.

    From: The line `acc *= alpha` forgotten: the first bug of most online softmaxes.
    Unseen: One tile of keys never moves it.
    """

    def rescaled_acc(self, acc, rescale):
        return acc


@near_miss(
    "attention.normaliser-not-rescaled",
    rejected_by=(
        "attention.forward.values",
        "attention.forward.lse",
        "attention.laws.doubled-keys",
    ),
)
class NoRescaleOfNormaliser(PlainAttention):
    """Does not rescale the normaliser when the maximum moves.

    From: The other half of the same line.
    Unseen: Inputs near zero: the factor is near one.
    """

    def rescaled_norm(self, norm, rescale):
        return norm


@near_miss(
    "attention.half-products",
    rejected_by=("attention.forward.float32-products", "attention.gradients.float32-range"),
)
class HalfProducts(PlainAttention):
    """Rounds float32 operands to float16 before each product.

    From: `tl.dot(q.to(tl.float16), ...)` in a public kernel, for speed.
    Unseen: The exercise's tolerance of 1e-2, and every GPU, where TF32 has eleven bits as well.
    """

    def dot(self, a, b):
        if a.dtype == torch.float32:
            a, b = a.half(), b.half()
        return super().dot(a, b)


@near_miss(
    "attention.maximum-from-zero",
    rejected_by=("attention.forward.large-logits", "attention.gradients.large-logits"),
)
class MaximumFromZero(PlainAttention):
    """Starts the running maximum at zero and not at -inf.

    From: `zeros` for `full(-inf)`; in the study 17 of 29 mutants lived on, this among them.
    Unseen: N(0, 1) inputs have a positive score in every row.
    """

    def start(self, like):
        return torch.zeros_like(like), torch.zeros_like(like)


@near_miss(
    "attention.no-maximum",
    rejected_by=("attention.forward.large-logits", "attention.laws.between-extremes"),
)
class NoMaximum(PlainAttention):
    """Subtracts no maximum.

    From: softmax as in a textbook.
    Unseen: exp of small scores does not overflow.
    """

    def maximum(self, m, s):
        return torch.zeros_like(m)


@near_miss(
    "attention.maximum-times-scale", rejected_by="attention.forward.negative-scale-wide-logits"
)
class MaximumTimesScale(PlainAttention):
    """Takes max(q k) times the scale for the maximum.

    From: The Triton tutorial's `tl.max(qk) * qk_scale`.
    Unseen: The scale is positive, or the scores lie within 128 binades.
    """

    _scale = 1.0

    def scores(self, q, k, scale):
        self._scale = scale
        return super().scores(q, k, scale)

    def maximum(self, m, s):
        largest = s.amin(dim=-1) if self._scale < 0 else s.amax(dim=-1)
        return torch.maximum(m, largest)


@near_miss(
    "attention.epsilon-in-normaliser",
    rejected_by=("attention.shapes.one-of-each", "attention.causal.first-row"),
)
class EpsilonInNormaliser(PlainAttention):
    """Adds 1e-6 to the normaliser.

    From: A guard against rows that see nothing.
    Unseen: Over hundreds of keys it is nothing.
    """

    def normalised(self, acc, norm):
        return acc / (norm[..., None] + 1e-6)


@near_miss(
    "attention.scale-ignored", rejected_by=("attention.forward.scale", "attention.gradients.scale")
)
class ScaleIgnored(PlainAttention):
    """Ignores a scale that is given.

    From: `sm_scale = 1 / sqrt(D)` inside the wrapper.
    Unseen: Tests leave the scale to its default.
    """

    def scale_of(self, scale, head_dim):
        return head_dim**-0.5


@near_miss(
    "attention.scale-zero-is-default",
    rejected_by=("attention.forward.scale", "attention.gradients.scale-zero"),
)
class ScaleZeroIsDefault(PlainAttention):
    """Takes a scale of zero for none.

    From: `scale or head_dim ** -0.5`.
    Unseen: Nobody passes zero, until a schedule begins there.
    """

    def scale_of(self, scale, head_dim):
        return scale or head_dim**-0.5


@near_miss("attention.scales-keys-in-their-dtype", rejected_by="attention.forward.lse")
class ScalesKeysInTheirDtype(PlainAttention):
    """Multiplies the scale into the keys, in the keys' dtype.

    From: The Triton tutorial bakes scale and log2(e) into a half-precision operand.
    Unseen: The output passes any test of the largest error; L is off by 50 times its rounding.
    """

    def scores(self, q, k, scale):
        return self.dot(q, (k * scale).transpose(-1, -2))


@near_miss(
    "attention.base-2-lse",
    rejected_by=(
        "attention.forward.lse-values",
        "attention.forward.lse",
        "attention.forward.equal-keys",
        "attention.laws.split-keys-merge",
    ),
)
class Base2Lse(PlainAttention):
    """Returns the log-sum-exp to base two.

    From: PyTorch issue 181645: kernels compute in base two, and L leaked.
    Unseen: The backward divides by it again; nobody looks at L itself.
    """

    def lse_of(self, m, norm):
        return super().lse_of(m, norm) / 0.6931471805599453

    def probabilities(self, q, k, lse, *where):
        return super().probabilities(q, k, lse * 0.6931471805599453, *where)


@near_miss(
    "attention.lse-in-dtype", rejected_by=("attention.forward.lse", "attention.blind-rows.zeros")
)
class LseInDtype(PlainAttention):
    """Returns the log-sum-exp in q's dtype.

    From: `.to(q.dtype)` over all outputs.
    Unseen: In float32 it is the same.
    """

    def __call__(self, q, k, v, **options):
        found = super().__call__(q, k, v, **options)
        return (found[0], found[1].to(q.dtype)) if options.get("return_lse") else found


@near_miss(
    "attention.returns-maximum",
    rejected_by=(
        "attention.forward.lse-values",
        "attention.forward.lse",
        "attention.laws.split-keys-merge",
        "attention.laws.doubled-keys",
    ),
)
class ReturnsMaximum(PlainAttention):
    """Returns the row's maximum for the log-sum-exp.

    From: Two statistics, m and L, under one name.
    Unseen: The backward has the right one.
    """

    def __call__(self, q, k, v, **options):
        found = super().__call__(q, k, v, **options)
        if not options.get("return_lse"):
            return found
        group = q.shape[-3] // k.shape[-3]
        s = q.float() @ k.repeat_interleave(group, -3).float().transpose(-1, -2)
        return found[0], (s * self.scale_of(options.get("scale"), q.shape[-1])).amax(dim=-1)
