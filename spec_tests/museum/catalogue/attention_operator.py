"""Near-misses of attention as an operator of PyTorch's: fakes, formulas, tangents, casts, state.

What concerns operators changes the reference, which has a pair of them.
"""

from __future__ import annotations

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.attention")
OPERATORS = Source("solution.attention.flash")

OPERATORS.near_miss(
    "attention.looks-at-values",
    "attention.operator.compiles",
    "  _refuse_tangents(q, k, v)",
    "+ if not bool(q.isfinite().all()):",
    '+     raise ValueError("expected q without NaN")',
    does="Looks for NaN in q before it computes.",
    seen="A check of inputs that reads a value on the host.",
    unseen="It is right, and slow on a device only.",
)

OPERATORS.near_miss(
    "attention.fake-like-q",
    "attention.operator.says-what-it-does",
    "- return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=sums)",
    "+ return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=sums)",
    does="Its fake output has the strides of q, the real one is contiguous.",
    seen="`empty_like(q)`; flash-attn issue 2777.",
    unseen="q is contiguous in tests of operators.",
)

OPERATORS.near_miss(
    "attention.uncounted",
    "attention.operator.is-counted",
    '- register_flop_formula(getattr(operators, f"flash_attention_{name}"))(_forward_flops)',
    '- register_flop_formula(getattr(operators, f"flash_attention_{name}_backward"))'
    "(_backward_flops)",
    does="Is an operator without a formula of its operations.",
    seen="`torch.library.custom_op`, and nothing more.",
    unseen="A zero in a table of utilisation is a low number among others.",
)

OPERATORS.near_miss(
    "attention.drops-tangents",
    "attention.autograd.transforms",
    "- _refuse_tangents(q, k, v)",
    does="Has a tangent of zero in forward mode.",
    seen="torch 2.13 drops it silently where no input of a custom operator requires a gradient; "
    "the reference of this repository did so.",
    unseen="Nobody uses forward mode, until a Hessian-vector product does.",
)

PLAIN.near_miss(
    "attention.autocast-reaches-inside",
    "attention.operator.under-autocast",
    "- with torch.autocast(q.device.type, enabled=False):",
    "-     out, lse = TiledAttention.apply(q, k, v, causal, scale)",
    "+ out, lse = TiledAttention.apply(q, k, v, causal, scale)",
    does="Lets autocast make its inner products half precision.",
    seen="Products of float32 in a forward that is called under autocast.",
    unseen="Without autocast it is right.",
)

PLAIN.near_miss(
    "attention.keeps-the-last-lse",
    "attention.autograd.calls-are-independent",
    "  lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype))",
    "+ forward.buffer = lse",
    "...",
    "- lse = lse.masked_fill(lse == -torch.inf, torch.inf)",
    "+ lse = forward.buffer.masked_fill(forward.buffer == -torch.inf, torch.inf)",
    does="Keeps the log-sum-exp of the last call for every backward.",
    seen="A buffer that is allocated once, for speed.",
    unseen="A test makes one call.",
)

PLAIN.near_miss(
    "attention.float64-by-float32",
    "attention.forward.float64",
    "- return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    "+ return (a.to(b.dtype).float() @ b.float()).to(wide(b.dtype))",
    does="Multiplies float64 in float32.",
    seen="`.float()` before every product, for the sake of half precision.",
    unseen="Tests are in float32.",
)

PLAIN.benign(
    "benign.attention-uneven-tiles",
    "- TILE_Q = 32",
    "+ TILE_Q = 48",
    "- TILE_K = 32",
    "+ TILE_K = 19",
    does="Tiles of 48 rows and 19 keys.",
)

PLAIN.benign(
    "benign.attention-last-tile-first",
    "- return [keys for keys in tiles(k.shape[2], TILE_K) if keys.start < end]",
    "+ return [keys for keys in tiles(k.shape[2], TILE_K)[::-1] if keys.start < end]",
    does="Visits tiles of keys from the end.",
)

# The maximum does not grow in the second pass: nothing is rescaled.
PLAIN.benign(
    "benign.attention-two-passes",
    "  m, norm = torch.full_like(acc[..., 0], -torch.inf), torch.zeros_like(acc[..., 0])",
    "+ for keys in tiles_seen(rows, q, k, causal):",
    "+     m = torch.maximum(m, scores(q, k, rows, keys, causal, scale).amax(dim=-1))",
    does="Takes the maximum of a row before it sums.",
)

# Exponentials and statistics of base two inside, the natural logarithm outside.
PLAIN.benign(
    "benign.attention-base-2",
    "  s = scores(q, k, rows, keys, causal, scale)",
    "+ s = s * 1.4426950408889634",
    "...",
    "- p = torch.exp(s - safe[..., None])",
    "- rescale = torch.exp(m - safe)",
    "+ p = torch.exp2(s - safe[..., None])",
    "+ rescale = torch.exp2(m - safe)",
    "...",
    "- lse[:, :, rows] = m + torch.log(norm)",
    "+ lse[:, :, rows] = (m + torch.log2(norm)) / 1.4426950408889634",
    does="Computes in base two, answers in base e.",
)

PLAIN.benign(
    "benign.attention-reciprocal",
    "- out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ out[:, :, rows] = acc * norm.masked_fill(norm == 0.0, 1.0).reciprocal()[..., None]",
    does="Multiplies by the reciprocal of the normaliser.",
)

PLAIN.benign(
    "benign.attention-wide-products",
    "- return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    "+ return a.to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    does="Rounds neither P nor dS.",
)

PLAIN.benign(
    "benign.attention-lse-is-no-output",
    "- return (out, lse) if return_lse else out",
    "+ return (out, lse.detach()) if return_lse else out",
    does="Marks the log-sum-exp non-differentiable.",
)

PLAIN.benign(
    "benign.attention-second-derivative",
    "- @once_differentiable",
    does="Has second derivatives, and right ones.",
)

PLAIN.benign("benign.attention-plain", does="The base of attention's impostors: the null one.")
