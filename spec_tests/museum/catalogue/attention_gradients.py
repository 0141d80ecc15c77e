"""Near-misses of attention's backward: delta, scale, sums, bounds, and what saw nothing."""

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.attention import PlainAttention

PLAIN = Source("spec_tests.plain.attention")

PLAIN.near_miss(
    "attention.no-delta",
    ("attention.gradients.values", "attention.gradients.half-precision", "attention.laws.masses"),
    "- return (out.to(wide) * do.to(wide)).sum(dim=-1)",
    "+ return 0.0 * out[..., 0].to(wide)",
    does="Leaves delta out of dS.",
    seen="The softmax's Jacobian taken for its diagonal.",
    unseen="It is small where dO and O are unrelated.",
)


@near_miss("attention.narrow-dk-dv", rejected_by="attention.gradients.long-sums")
class NarrowDkDv(PlainAttention):
    """Sums dK and dV in the inputs' dtype.

    From: `torch.zeros_like(k)` for what is added up tile by tile.
    Unseen: The largest error doubles; tests allow three times.
    """

    def q_tiles(self, num):
        return [range(i, min(i + self.tile_q, num)) for i in range(0, num, self.tile_q)]

    def added_dkv(self, acc, product, dtype):
        return (acc + product).to(dtype).to(acc.dtype)


PLAIN.near_miss(
    "attention.float16-products",
    (
        "attention.gradients.wide-range",
        "attention.gradients.float32-range",
        "attention.laws.powers-of-two",
    ),
    "- return p.to(dtype)",
    "+ return p.to(torch.float16).to(dtype)",
    does="Casts P and dS to float16, whatever the inputs are.",
    seen="The Triton tutorial's `.to(tl.float16)`.",
    unseen="The tests are in float16.",
)

PLAIN.near_miss(
    "attention.rounded-then-summed",
    "attention.shapes.grouped-sums-are-wide",
    "- dk, dv = (self.summed(t, k, heads) for t in (dk, dv))",
    "+ dk, dv = (self.summed(t.to(k.dtype), k, heads) for t in (dk, dv))",
    does="Rounds dK and dV of each query head before it sums them.",
    seen="dK of all query heads in the inputs' dtype, then `.sum`; levanter issue 449.",
    unseen="Groups of two, in float32.",
)

PLAIN.near_miss(
    "attention.backward-always-causal",
    ("attention.gradients.values", "attention.laws.products"),
    "  q, k, v, out, lse = saved",
    "+ causal = True",
    does="The backward is causal, whatever the forward was.",
    seen="Triton issue 5660: the tutorial's backward had no flag.",
    unseen="The test was causal.",
)

PLAIN.near_miss(
    "attention.backward-top-left",
    "attention.causal.gradients-bottom-right",
    "- s = self.masked(s, rows, keys, k.shape[2] - q.shape[2]) if causal else s",
    "+ s = self.masked(s, rows, keys, 0) if causal else s",
    does="The backward aligns its mask at the first query.",
    seen="One of the two masks moved when the convention did.",
    unseen="Equal lengths.",
)

PLAIN.near_miss(
    "attention.drops-lse-gradient",
    "attention.gradients.of-the-lse",
    "- return delta if dl is None else delta - dl",
    "+ return delta",
    does="Returns L as differentiable and drops its gradient.",
    seen="flash-attn issue 889.",
    unseen="Nobody differentiates L, until a z-loss does.",
)

PLAIN.near_miss(
    "attention.keys-decide-for-values",
    "attention.gradients.only-where-wanted",
    "+ needed = (*needed[:2], needed[1] and needed[2])",
    "  return [g if is_needed else None for g, is_needed in zip(found, needed, strict=True)]",
    does="Computes dV only where k wants a gradient.",
    seen="One flag for the kernel that makes both.",
    unseen="Tests want all three.",
)

PLAIN.near_miss(
    "attention.second-derivative",
    "attention.autograd.second-derivatives",
    "- has_second_derivative = False",
    "+ has_second_derivative = True",
    "...",
    "- saves_copy_of_lse = False",
    "+ saves_copy_of_lse = True",
    does="Has a second derivative with L held constant.",
    seen="A backward of torch operations without `once_differentiable`.",
    unseen="Nobody differentiates twice, and the number looks like one.",
)

PLAIN.near_miss(
    "attention.saved-by-attribute",
    "attention.autograd.changes-are-noticed",
    "- saves_by_attribute = False",
    "+ saves_by_attribute = True",
    does="Keeps tensors as attributes of the context.",
    seen="`ctx.q = q` for `save_for_backward`.",
    unseen="Nobody changes them in between, until an optimizer in backward does.",
)

PLAIN.near_miss(
    "attention.clamps-scores",
    "attention.gradients.large-logits",
    "- of_rows = lse[:, :, rows.start : rows.stop, None]",
    "+ of_rows = lse[:, :, rows.start : rows.stop, None].clamp(-80.0, 80.0)",
    "...",
    "- return torch.exp(s - of_rows.masked_fill(of_rows == -torch.inf, torch.inf))",
    "+ return torch.exp(s - of_rows.masked_fill(of_rows == -torch.inf, torch.inf)).clamp(max=1.0)",
    does="Clamps L and the probabilities of the backward.",
    seen="An overflow mended where it was seen.",
    unseen="Scores are small.",
)

PLAIN.near_miss(
    "attention.once-differentiable",
    "attention.autograd.second-derivatives-in-a-sum",
    does="Drops the second derivative in silence where the loss has another term.",
    seen="`once_differentiable` raises for a dO that wants a gradient, and lets others through.",
    unseen="Alone it raises: the gradient has no graph.",
)
