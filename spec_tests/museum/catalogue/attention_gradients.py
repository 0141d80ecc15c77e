"""Near-misses of attention's backward: delta, scale, sums, bounds, and what saw nothing."""

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.attention")

PLAIN.near_miss(
    "attention.no-delta",
    ("attention.gradients.values", "attention.gradients.half-precision", "attention.laws.masses"),
    "- delta = (out.to(wide(q.dtype)) * do.to(wide(q.dtype))).sum(dim=-1)",
    "+ delta = torch.zeros_like(lse)",
    does="Leaves delta out of dS.",
    seen="The softmax's Jacobian taken for its diagonal.",
    unseen="It is small where dO and O are unrelated.",
)

PLAIN.near_miss(
    "attention.narrow-dk-dv",
    "attention.gradients.long-sums",
    "- TILE_Q = 32",
    "+ TILE_Q = 8",
    "...",
    "- dq, dk, dv = (t.new_zeros(t.shape, dtype=wide(q.dtype)) for t in (q, k_read, v_read))",
    "+ dq = q.new_zeros(q.shape, dtype=wide(q.dtype))",
    "+ dk, dv = torch.zeros_like(k_read), torch.zeros_like(v_read)",
    does="Sums dK and dV in the inputs' dtype.",
    seen="`torch.zeros_like(k)` for what is added up tile by tile.",
    unseen="The largest error doubles; tests allow three times.",
)

PLAIN.near_miss(
    "attention.float16-products",
    (
        "attention.gradients.wide-range",
        "attention.gradients.float32-range",
        "attention.laws.powers-of-two",
    ),
    "- acc = acc * rescale[..., None] + dot(p, v[:, :, keys])",
    "+ acc = acc * rescale[..., None] + dot(p.half(), v[:, :, keys])",
    "...",
    "  ds = p * (dp - delta[:, :, rows, None])",
    "+ p, ds = p.half(), ds.half()",
    does="Casts P and dS to float16, whatever the inputs are.",
    seen="The Triton tutorial's `.to(tl.float16)`.",
    unseen="The tests are in float16.",
)

PLAIN.near_miss(
    "attention.rounded-then-summed",
    "attention.shapes.grouped-sums-are-wide",
    "+ dk, dv = dk.to(k.dtype), dv.to(v.dtype)",
    "  dk, dv = (t.new_zeros(k.shape).index_add_(1, heads, t) for t in (dk, dv))",
    does="Rounds dK and dV of each query head before it sums them.",
    seen="dK of all query heads in the inputs' dtype, then `.sum`; levanter issue 449.",
    unseen="Groups of two, in float32.",
)

PLAIN.near_miss(
    "attention.backward-always-causal",
    ("attention.gradients.values", "attention.laws.products"),
    "  do = torch.zeros_like(out) if do is None else do",
    "+ causal = True",
    does="The backward is causal, whatever the forward was.",
    seen="Triton issue 5660: the tutorial's backward had no flag.",
    unseen="The test was causal.",
)

PLAIN.near_miss(
    "attention.backward-top-left",
    "attention.causal.gradients-bottom-right",
    "- s = scores(q, k_read, rows, keys, causal, scale)",
    "+ s = scores(q, k_read, rows, keys, False, scale)",
    "+ above = torch.ones_like(s, dtype=torch.bool).triu(rows.start - keys.start + 1)",
    "+ s = s.masked_fill(above, -torch.inf) if causal else s",
    does="The backward aligns its mask at the first query.",
    seen="One of the two masks moved when the convention did.",
    unseen="Equal lengths.",
)

PLAIN.near_miss(
    "attention.drops-lse-gradient",
    "attention.gradients.of-the-lse",
    "- delta = delta if dl is None else delta - dl",
    does="Returns L as differentiable and drops its gradient.",
    seen="flash-attn issue 889.",
    unseen="Nobody differentiates L, until a z-loss does.",
)

PLAIN.near_miss(
    "attention.keys-decide-for-values",
    "attention.gradients.only-where-wanted",
    "- wanted = ctx.needs_input_grad[:3]",
    "+ wanted = (*ctx.needs_input_grad[:2], all(ctx.needs_input_grad[1:3]))",
    does="Computes dV only where k wants a gradient.",
    seen="One flag for the kernel that makes both.",
    unseen="Tests want all three.",
)

# An output that is saved stays part of the graph; a copy of it is a constant.
PLAIN.near_miss(
    "attention.second-derivative",
    "attention.autograd.second-derivatives",
    "- ctx.save_for_backward(q, k, v, out, lse)",
    "+ ctx.save_for_backward(q, k, v, out, lse.clone())",
    "...",
    "- @once_differentiable",
    does="Has a second derivative with L held constant.",
    seen="A backward of torch operations without `once_differentiable`.",
    unseen="Nobody differentiates twice, and the number looks like one.",
)

PLAIN.near_miss(
    "attention.saved-by-attribute",
    "attention.autograd.changes-are-noticed",
    "- ctx.save_for_backward(q, k, v, out, lse)",
    "+ ctx.kept = [t.detach() for t in (q, k, v, out, lse)]",
    "...",
    "- found = backward(ctx.saved_tensors, do, dl, *ctx.options)",
    "+ found = backward(ctx.kept, do, dl, *ctx.options)",
    does="Keeps tensors as attributes of the context.",
    seen="`ctx.q = q` for `save_for_backward`.",
    unseen="Nobody changes them in between, until an optimizer in backward does.",
)

PLAIN.near_miss(
    "attention.clamps-scores",
    "attention.gradients.large-logits",
    "- lse = lse.masked_fill(lse == -torch.inf, torch.inf)",
    "+ lse = lse.clamp(-80.0, 80.0)",
    "...",
    "- p = torch.exp(s - lse[:, :, rows, None])",
    "+ p = torch.exp(s - lse[:, :, rows, None]).clamp(max=1.0)",
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
