"""Near-misses of attention's values: the softmax, the scale, the sums, the log-sum-exp."""

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.attention")

PLAIN.near_miss(
    "attention.finite-sentinel",
    "attention.forward.scores-far-below-zero",
    "- m, norm = torch.full_like(acc[..., 0], -torch.inf), torch.zeros_like(acc[..., 0])",
    "+ m, norm = torch.full_like(acc[..., 0], -5e4), torch.zeros_like(acc[..., 0])",
    does="Begins the running maximum at -5e4.",
    seen="flashinfer pull request 4401.",
    unseen="Scores of real models are hundreds at most.",
)

PLAIN.near_miss(
    "attention.rescales-by-a-diagonal",
    "attention.forward.rows-are-apart",
    "- acc = acc * rescale[..., None] + dot(p, v[:, :, keys])",
    "+ acc = torch.diag_embed(rescale) @ acc + dot(p, v[:, :, keys])",
    does="Rescales the rows of a tile by a product with a diagonal matrix.",
    seen="`torch.diag(factors) @ acc`, in two solutions of CS336: the paper writes it so.",
    unseen="Nobody tests with NaN, and all finite numbers are right.",
)

PLAIN.near_miss(
    "attention.sum-not-rescaled",
    (
        "attention.forward.values",
        "attention.gradients.values",
        "attention.laws.changes-of-keys",
        "attention.shapes.lengths-of-the-forward",
    ),
    "- acc = acc * rescale[..., None] + dot(p, v[:, :, keys])",
    "+ acc = acc + dot(p, v[:, :, keys])",
    does="Does not rescale the running sum of p v when the maximum moves.",
    seen="The line `acc *= alpha` forgotten: the first bug of most online softmaxes.",
    unseen="One tile of keys never moves it.",
)

PLAIN.near_miss(
    "attention.half-products",
    ("attention.forward.float32-products", "attention.gradients.float32-range"),
    "+ if b.dtype == torch.float32:",
    "+     a, b = a.half(), b.half()",
    "  return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    does="Rounds float32 operands to float16 before each product.",
    seen="`tl.dot(q.to(tl.float16), ...)` in a public kernel, for speed.",
    unseen="The exercise's tolerance of 1e-2, and every GPU, where TF32 has eleven bits as well.",
)

PLAIN.near_miss(
    "attention.no-maximum",
    ("attention.forward.large-logits", "attention.laws.between-extremes"),
    "- new = torch.maximum(m, s.amax(dim=-1))",
    "+ new = torch.zeros_like(m)",
    does="Subtracts no maximum.",
    seen="softmax as in a textbook.",
    unseen="exp of small scores does not overflow.",
)

PLAIN.near_miss(
    "attention.maximum-times-scale",
    "attention.forward.negative-scale-wide-logits",
    "- new = torch.maximum(m, s.amax(dim=-1))",
    "+ new = torch.maximum(m, s.amin(dim=-1) if scale < 0 else s.amax(dim=-1))",
    does="Takes max(q k) times the scale for the maximum.",
    seen="The Triton tutorial's `tl.max(qk) * qk_scale`.",
    unseen="The scale is positive, or the scores lie within 128 binades.",
)

PLAIN.near_miss(
    "attention.epsilon-in-normaliser",
    ("attention.shapes.one-of-each", "attention.causal.first-row"),
    "- out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ out[:, :, rows] = acc / (norm[..., None] + 1e-6)",
    does="Adds 1e-6 to the normaliser.",
    seen="A guard against rows that see nothing.",
    unseen="Over hundreds of keys it is nothing.",
)

PLAIN.near_miss(
    "attention.scale-ignored",
    ("attention.forward.scale", "attention.gradients.scale"),
    "- scale = q.shape[-1] ** -0.5 if scale is None else scale",
    "+ scale = q.shape[-1] ** -0.5",
    does="Ignores a scale that is given.",
    seen="`sm_scale = 1 / sqrt(D)` inside the wrapper.",
    unseen="Tests leave the scale to its default.",
)

PLAIN.near_miss(
    "attention.scale-zero-is-default",
    ("attention.forward.scale", "attention.gradients.scale-zero"),
    "- scale = q.shape[-1] ** -0.5 if scale is None else scale",
    "+ scale = scale or q.shape[-1] ** -0.5",
    does="Takes a scale of zero for none.",
    seen="`scale or head_dim ** -0.5`.",
    unseen="Nobody passes zero, until a schedule begins there.",
)

PLAIN.near_miss(
    "attention.scales-keys-in-their-dtype",
    "attention.forward.lse",
    "- s = dot(q[:, :, rows], k[:, :, keys].transpose(-1, -2)) * scale",
    "+ s = dot(q[:, :, rows], (k[:, :, keys] * scale).transpose(-1, -2))",
    does="Multiplies the scale into the keys, in the keys' dtype.",
    seen="The Triton tutorial bakes scale and log2(e) into a half-precision operand.",
    unseen="The output passes any test of the largest error; L is off by 50 times its rounding.",
)

PLAIN.near_miss(
    "attention.base-2-lse",
    (
        "attention.forward.lse-values",
        "attention.forward.lse",
        "attention.forward.equal-keys",
        "attention.laws.split-keys-merge",
        "attention.laws.doubled-keys",
    ),
    "- lse[:, :, rows] = m + torch.log(norm)",
    "+ lse[:, :, rows] = (m + torch.log(norm)) / 0.6931471805599453",
    "...",
    "+ lse = 0.6931471805599453 * lse",
    "  lse = lse.masked_fill(lse == -torch.inf, torch.inf)",
    does="Returns the log-sum-exp to base two.",
    seen="PyTorch issue 181645: kernels compute in base two, and L leaked.",
    unseen="The backward divides by it again; nobody looks at L itself.",
)

PLAIN.near_miss(
    "attention.lse-in-dtype",
    ("attention.forward.lse", "attention.blind-rows.zeros"),
    "- return (out, lse) if return_lse else out",
    "+ return (out, lse.to(q.dtype)) if return_lse else out",
    does="Returns the log-sum-exp in q's dtype.",
    seen="`.to(q.dtype)` over all outputs.",
    unseen="In float32 it is the same.",
)
