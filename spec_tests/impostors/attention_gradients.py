"""Near-misses of attention's backward: delta, scale, sums, bounds, and what saw nothing."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.attention_values import card
from spec_tests.impostors.plain_attention import PlainAttention, Tensor


class NoDelta(PlainAttention):
    def delta(self, out: Tensor, do: Tensor) -> Tensor:
        return torch.zeros_like(super().delta(out, do))


class UnscaledDq(PlainAttention):
    def scale_of_dq(self, scale: float) -> float:
        return 1.0


class UnscaledDk(PlainAttention):
    def scale_of_dk(self, scale: float) -> float:
        return 1.0


class DefaultScaleInBackward(PlainAttention):
    def scale_of_dk(self, scale: float) -> float:
        return 16**-0.5 if scale not in (0.0, 24**-0.5) else scale


class NarrowDq(PlainAttention):
    def k_tiles(self, num: int) -> list[range]:
        return [range(i, min(i + self.tile_k, num)) for i in range(0, num, self.tile_k)]

    def added_dq(self, acc: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        return (acc + product).to(dtype).to(acc.dtype)


class NarrowDkDv(PlainAttention):
    def q_tiles(self, num: int) -> list[range]:
        return [range(i, min(i + self.tile_q, num)) for i in range(0, num, self.tile_q)]

    def added_dkv(self, acc: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        return (acc + product).to(dtype).to(acc.dtype)


class Float16Products(PlainAttention):
    """P and dS go through float16, whatever the inputs are."""

    def narrow(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        return p.to(torch.float16).to(dtype)


class LastOfGroup(PlainAttention):
    """dK and dV of a group are those of its last query head: stored, not added."""

    def summed(self, gradient: Tensor, of: Tensor, heads: Tensor) -> Tensor:
        whole = torch.zeros(of.shape, dtype=gradient.dtype, device=of.device)
        for head, kv_head in enumerate(heads.tolist()):
            whole[:, kv_head] = gradient[:, head]
        return whole


class RoundedThenSummed(PlainAttention):
    def summed(self, gradient: Tensor, of: Tensor, heads: Tensor) -> Tensor:
        return super().summed(gradient.to(of.dtype), of, heads)


class BackwardAlwaysCausal(PlainAttention):
    def backward(self, saved: Any, do: Tensor, dl: Any, causal: bool, scale: float) -> Any:
        return super().backward(saved, do, dl, True, scale)


class BackwardTopLeft(PlainAttention):
    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, *where: Any) -> Tensor:
        rows, keys, causal, scale = where
        p = super().probabilities(q, k, lse, rows, keys, False, scale)
        return p.masked_fill(~self.visible(rows, keys, 0), 0.0) if causal else p


class BackwardUnmasked(PlainAttention):
    """Skips tiles above the diagonal, and masks none on it."""

    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, *where: Any) -> Tensor:
        rows, keys, _, scale = where
        return super().probabilities(q, k, lse, rows, keys, False, scale)


class BackwardStartsLate(PlainAttention):
    """The first tile of rows that sees a tile of keys is a bound rounded up."""

    def is_skipped_backward(self, rows: range, keys: range, shift: int) -> bool:
        return rows.start + shift < keys.start


class DropsLseGradient(PlainAttention):
    def folded(self, delta: Tensor, dl: Tensor | None) -> Tensor:
        return delta


class AddsLseGradient(PlainAttention):
    def folded(self, delta: Tensor, dl: Tensor | None) -> Tensor:
        return delta if dl is None else delta + dl


class BlindGradientNan(PlainAttention):
    """exp(-inf - (-inf)) in rows that see nothing."""

    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, *where: Any) -> Tensor:
        rows, keys, causal, scale = where
        at = slice(rows.start, rows.stop)
        s = self.scores(q[:, :, at], k[:, :, keys.start : keys.stop], scale)
        s = self.masked(s, rows, keys, k.shape[2] - q.shape[2]) if causal else s
        return torch.exp(s - lse[:, :, at, None])

    def is_skipped_backward(self, rows: range, keys: range, shift: int) -> bool:
        return False


class KeysDecideForValues(PlainAttention):
    def returned(self, found: tuple[Any, ...], needed: tuple[bool, ...]) -> list[Any]:
        return super().returned(found, (needed[0], needed[1], needed[1] and needed[2]))


class SecondDerivative(PlainAttention):
    has_second_derivative = True
    saves_copy_of_lse = True


class SavedByAttribute(PlainAttention):
    saves_by_attribute = True


class ClampsScores(PlainAttention):
    """Clamps what it exponentiates, where an overflow was once seen."""

    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, *where: Any) -> Tensor:
        return super().probabilities(q, k, lse.clamp(-80.0, 80.0), *where).clamp(max=1.0)


IMPOSTORS = (
    card(
        NoDelta,
        "no-delta",
        "Leaves delta out of dS.",
        "The softmax's Jacobian taken for its diagonal.",
        "It is small where dO and O are unrelated.",
        "attention.gradients.values",
        "attention.gradients.half-precision",
        "attention.laws.masses",
    ),
    card(
        UnscaledDq,
        "unscaled-dq",
        "Does not multiply dQ by the scale.",
        "The scale was moved into k for the forward, and out again for one side only.",
        "Adam does not feel a constant factor.",
        "attention.gradients.values",
        "attention.laws.products",
    ),
    card(
        UnscaledDk,
        "unscaled-dk",
        "Does not multiply dK by the scale.",
        "Likewise.",
        "Adam does not feel a constant factor.",
        "attention.gradients.values",
        "attention.gradients.scale-zero",
    ),
    card(
        DefaultScaleInBackward,
        "default-scale-in-backward",
        "Multiplies dK by a scale of its own.",
        "A backward that computes `head_dim ** -0.5` anew.",
        "Tests leave the scale to its default.",
        "attention.gradients.scale",
    ),
    card(
        NarrowDq,
        "narrow-dq",
        "Sums dQ in the inputs' dtype.",
        "dQ accumulated in global memory of q's dtype.",
        "The largest error grows by a third only.",
        "attention.gradients.long-sums",
    ),
    card(
        NarrowDkDv,
        "narrow-dk-dv",
        "Sums dK and dV in the inputs' dtype.",
        "Likewise.",
        "The largest error doubles; tests allow three times.",
        "attention.gradients.long-sums",
    ),
    card(
        Float16Products,
        "float16-products",
        "Casts P and dS to float16, whatever the inputs are.",
        "The Triton tutorial's `.to(tl.float16)`.",
        "The tests are in float16.",
        "attention.gradients.wide-range",
        "attention.gradients.float32-range",
        "attention.laws.powers-of-two",
    ),
    card(
        LastOfGroup,
        "last-of-group",
        "dK and dV of a group are those of its last query head.",
        "A store where a sum over heads belongs.",
        "As many key heads as query heads.",
        "attention.shapes.grouped-heads",
        "attention.laws.masses",
    ),
    card(
        RoundedThenSummed,
        "rounded-then-summed",
        "Rounds dK and dV of each query head before it sums them.",
        "dK of all query heads in the inputs' dtype, then `.sum`; levanter issue 449.",
        "Groups of two, in float32.",
        "attention.shapes.grouped-sums-are-wide",
    ),
    card(
        BackwardAlwaysCausal,
        "backward-always-causal",
        "The backward is causal, whatever the forward was.",
        "Triton issue 5660: the tutorial's backward had no flag.",
        "The test was causal.",
        "attention.gradients.values",
        "attention.laws.products",
    ),
    card(
        BackwardTopLeft,
        "backward-top-left",
        "The backward aligns its mask at the first query.",
        "One of the two masks moved when the convention did.",
        "Equal lengths.",
        "attention.causal.gradients-bottom-right",
    ),
    card(
        BackwardUnmasked,
        "backward-unmasked",
        "The backward skips hidden tiles, and masks none.",
        "Block skipping taken for the whole of the mask.",
        "The forward is right; the loss falls.",
        "attention.causal.equal-lengths",
        "attention.causal.hidden-keys-do-not-matter",
    ),
    card(
        BackwardStartsLate,
        "backward-starts-late",
        "Leaves out the tile of rows that begins before a tile of keys.",
        "`start_n // BLOCK_M` rounded up; the tutorial asserts that one tile divides the other.",
        "Tiles of one size, equal lengths.",
        "attention.shapes.ragged-lengths",
    ),
    card(
        DropsLseGradient,
        "drops-lse-gradient",
        "Returns L as differentiable and drops its gradient.",
        "flash-attn issue 889.",
        "Nobody differentiates L, until a z-loss does.",
        "attention.gradients.of-the-lse",
    ),
    card(
        AddsLseGradient,
        "adds-lse-gradient",
        "Adds the gradient of L to delta.",
        "A sign: delta - dL.",
        "Nobody differentiates L.",
        "attention.gradients.of-the-lse",
    ),
    card(
        BlindGradientNan,
        "blind-gradient-is-nan",
        "exp(-inf - (-inf)) in the backward's rows that see nothing.",
        "The forward was mended, the backward not.",
        "Rows that see nothing do not occur with equal lengths.",
        "attention.blind-rows.gradients",
        "attention.causal.gradients-bottom-right",
    ),
    card(
        KeysDecideForValues,
        "keys-decide-for-values",
        "Computes dV only where k wants a gradient.",
        "One flag for the kernel that makes both.",
        "Tests want all three.",
        "attention.gradients.only-where-wanted",
    ),
    card(
        PlainAttention,
        "once-differentiable",
        "Drops the second derivative in silence where the loss has another term.",
        "`once_differentiable` raises for a dO that wants a gradient, and lets others through.",
        "Alone it raises: the gradient has no graph.",
        "attention.autograd.second-derivatives-in-a-sum",
    ),
    card(
        SecondDerivative,
        "second-derivative",
        "Has a second derivative with L held constant.",
        "A backward of torch operations without `once_differentiable`.",
        "Nobody differentiates twice, and the number looks like one.",
        "attention.autograd.second-derivatives",
    ),
    card(
        SavedByAttribute,
        "saved-by-attribute",
        "Keeps tensors as attributes of the context.",
        "`ctx.q = q` for `save_for_backward`.",
        "Nobody changes them in between, until an optimizer in backward does.",
        "attention.autograd.changes-are-noticed",
    ),
    card(
        ClampsScores,
        "clamps-scores",
        "Clamps L and the probabilities of the backward.",
        "An overflow mended where it was seen.",
        "Scores are small.",
        "attention.gradients.large-logits",
    ),
)
