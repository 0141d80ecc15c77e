"""Near-misses of attention's backward: delta, scale, sums, bounds, and what saw nothing."""

import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.attention import PlainAttention


@near_miss(
    "attention.no-delta",
    rejected_by=(
        "attention.gradients.values",
        "attention.gradients.half-precision",
        "attention.laws.masses",
    ),
)
class NoDelta(PlainAttention):
    """Leaves delta out of dS.

    From: The softmax's Jacobian taken for its diagonal.
    Unseen: It is small where dO and O are unrelated.
    """

    def delta(self, out, do):
        return torch.zeros_like(super().delta(out, do))


@near_miss(
    "attention.unscaled-dq", rejected_by=("attention.gradients.values", "attention.laws.products")
)
class UnscaledDq(PlainAttention):
    """Does not multiply dQ by the scale.

    From: The scale was moved into k for the forward, and out again for one side only.
    Unseen: Adam does not feel a constant factor.
    """

    def scale_of_dq(self, scale):
        return 1.0


@near_miss(
    "attention.unscaled-dk",
    rejected_by=("attention.gradients.values", "attention.gradients.scale-zero"),
)
class UnscaledDk(PlainAttention):
    """Does not multiply dK by the scale.

    From: Likewise.
    Unseen: Adam does not feel a constant factor.
    """

    def scale_of_dk(self, scale):
        return 1.0


@near_miss("attention.default-scale-in-backward", rejected_by="attention.gradients.scale")
class DefaultScaleInBackward(PlainAttention):
    """Multiplies dK by a scale of its own.

    From: A backward that computes `head_dim ** -0.5` anew.
    Unseen: Tests leave the scale to its default.
    """

    def scale_of_dk(self, scale):
        return 16**-0.5 if scale not in (0.0, 24**-0.5) else scale


@near_miss("attention.narrow-dk-dv", rejected_by="attention.gradients.long-sums")
class NarrowDkDv(PlainAttention):
    """Sums dK and dV in the inputs' dtype.

    From: Likewise.
    Unseen: The largest error doubles; tests allow three times.
    """

    def q_tiles(self, num):
        return [range(i, min(i + self.tile_q, num)) for i in range(0, num, self.tile_q)]

    def added_dkv(self, acc, product, dtype):
        return (acc + product).to(dtype).to(acc.dtype)


@near_miss(
    "attention.float16-products",
    rejected_by=(
        "attention.gradients.wide-range",
        "attention.gradients.float32-range",
        "attention.laws.powers-of-two",
    ),
)
class Float16Products(PlainAttention):
    """Casts P and dS to float16, whatever the inputs are.

    From: The Triton tutorial's `.to(tl.float16)`.
    Unseen: The tests are in float16.
    """

    def narrow(self, p, dtype):
        return p.to(torch.float16).to(dtype)


@near_miss(
    "attention.last-of-group",
    rejected_by=("attention.shapes.grouped-heads", "attention.laws.masses"),
)
class LastOfGroup(PlainAttention):
    """dK and dV of a group are those of its last query head.

    From: A store where a sum over heads belongs.
    Unseen: As many key heads as query heads.
    """

    def summed(self, gradient, of, heads):
        whole = torch.zeros(of.shape, dtype=gradient.dtype, device=of.device)
        for head, kv_head in enumerate(heads.tolist()):
            whole[:, kv_head] = gradient[:, head]
        return whole


@near_miss("attention.rounded-then-summed", rejected_by="attention.shapes.grouped-sums-are-wide")
class RoundedThenSummed(PlainAttention):
    """Rounds dK and dV of each query head before it sums them.

    From: dK of all query heads in the inputs' dtype, then `.sum`; levanter issue 449.
    Unseen: Groups of two, in float32.
    """

    def summed(self, gradient, of, heads):
        return super().summed(gradient.to(of.dtype), of, heads)


@near_miss(
    "attention.backward-always-causal",
    rejected_by=("attention.gradients.values", "attention.laws.products"),
)
class BackwardAlwaysCausal(PlainAttention):
    """The backward is causal, whatever the forward was.

    From: Triton issue 5660: the tutorial's backward had no flag.
    Unseen: The test was causal.
    """

    def backward(self, saved, do, dl, causal, scale):
        return super().backward(saved, do, dl, True, scale)


@near_miss("attention.backward-top-left", rejected_by="attention.causal.gradients-bottom-right")
class BackwardTopLeft(PlainAttention):
    """The backward aligns its mask at the first query.

    From: One of the two masks moved when the convention did.
    Unseen: Equal lengths.
    """

    def probabilities(self, q, k, lse, *where):
        rows, keys, causal, scale = where
        p = super().probabilities(q, k, lse, rows, keys, False, scale)
        return p.masked_fill(~self.visible(rows, keys, 0), 0.0) if causal else p


@near_miss(
    "attention.backward-unmasked",
    rejected_by=("attention.causal.equal-lengths", "attention.causal.hidden-keys-do-not-matter"),
)
class BackwardUnmasked(PlainAttention):
    """The backward skips hidden tiles, and masks none.

    From: Block skipping taken for the whole of the mask.
    Unseen: The forward is right; the loss falls.
    """

    def probabilities(self, q, k, lse, *where):
        rows, keys, _, scale = where
        return super().probabilities(q, k, lse, rows, keys, False, scale)


@near_miss("attention.drops-lse-gradient", rejected_by="attention.gradients.of-the-lse")
class DropsLseGradient(PlainAttention):
    """Returns L as differentiable and drops its gradient.

    From: flash-attn issue 889.
    Unseen: Nobody differentiates L, until a z-loss does.
    """

    def folded(self, delta, dl):
        return delta


@near_miss(
    "attention.blind-gradient-is-nan",
    rejected_by=("attention.blind-rows.gradients", "attention.causal.gradients-bottom-right"),
)
class BlindGradientNan(PlainAttention):
    """exp(-inf - (-inf)) in the backward's rows that see nothing.

    From: The forward was mended, the backward not.
    Unseen: Rows that see nothing do not occur with equal lengths.
    """

    def probabilities(self, q, k, lse, *where):
        rows, keys, causal, scale = where
        at = slice(rows.start, rows.stop)
        s = self.scores(q[:, :, at], k[:, :, keys.start : keys.stop], scale)
        s = self.masked(s, rows, keys, k.shape[2] - q.shape[2]) if causal else s
        return torch.exp(s - lse[:, :, at, None])

    def is_skipped_backward(self, rows, keys, shift):
        return False


@near_miss("attention.keys-decide-for-values", rejected_by="attention.gradients.only-where-wanted")
class KeysDecideForValues(PlainAttention):
    """Computes dV only where k wants a gradient.

    From: One flag for the kernel that makes both.
    Unseen: Tests want all three.
    """

    def returned(self, found, needed):
        return super().returned(found, (needed[0], needed[1], needed[1] and needed[2]))


@near_miss("attention.second-derivative", rejected_by="attention.autograd.second-derivatives")
class SecondDerivative(PlainAttention):
    """Has a second derivative with L held constant.

    From: A backward of torch operations without `once_differentiable`.
    Unseen: Nobody differentiates twice, and the number looks like one.
    """

    has_second_derivative = True
    saves_copy_of_lse = True


@near_miss("attention.saved-by-attribute", rejected_by="attention.autograd.changes-are-noticed")
class SavedByAttribute(PlainAttention):
    """Keeps tensors as attributes of the context.

    From: `ctx.q = q` for `save_for_backward`.
    Unseen: Nobody changes them in between, until an optimizer in backward does.
    """

    saves_by_attribute = True


@near_miss("attention.clamps-scores", rejected_by="attention.gradients.large-logits")
class ClampsScores(PlainAttention):
    """Clamps L and the probabilities of the backward.

    From: An overflow mended where it was seen.
    Unseen: Scores are small.
    """

    def probabilities(self, q, k, lse, *where):
        return super().probabilities(q, k, lse.clamp(-80.0, 80.0), *where).clamp(max=1.0)


@near_miss(
    "attention.once-differentiable", rejected_by="attention.autograd.second-derivatives-in-a-sum"
)
class OnceDifferentiable(PlainAttention):
    """Drops the second derivative in silence where the loss has another term.

    From: `once_differentiable` raises for a dO that wants a gradient, and lets others through.
    Unseen: Alone it raises: the gradient has no graph.
    """
