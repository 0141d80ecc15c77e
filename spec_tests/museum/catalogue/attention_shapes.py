"""Near-misses of causal masks, shapes and layouts."""

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.attention")

PLAIN.near_miss(
    "attention.causal-top-left",
    ("attention.causal.bottom-right", "attention.causal.gradients-bottom-right"),
    "- end = rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]",
    "+ end = rows.stop if causal else k.shape[2]",
    "...",
    "- last = torch.arange(rows.start, rows.stop, device=q.device) + k.shape[2] - q.shape[2]",
    "+ last = torch.arange(rows.start, rows.stop, device=q.device)",
    does="Aligns the causal mask at the first query.",
    seen="PyTorch's own convention; flash-attn before 2.1.",
    unseen="Equal lengths: there it is the same.",
)

PLAIN.near_miss(
    "attention.causal-one-ahead",
    ("attention.causal.prefix", "attention.causal.hidden-keys-do-not-matter"),
    "- return s.masked_fill(key > last[:, None], -torch.inf)",
    "+ return s.masked_fill(key > last[:, None] + 1, -torch.inf)",
    does="Sees one key of the future.",
    seen="`<=` on an index that was already shifted.",
    unseen="The loss falls faster than ever.",
)

PLAIN.near_miss(
    "attention.causal-ignored",
    "attention.causal.equal-lengths",
    "  check(q, k, v)",
    "+ causal = False",
    does="Takes the flag and ignores it.",
    seen="CS336 allows it in the version without Triton, where 10 of 25 leave it so.",
    unseen="The course tests that version without the mask.",
)

PLAIN.near_miss(
    "attention.whole-tiles-only",
    ("attention.shapes.ragged-lengths", "attention.shapes.head-dims"),
    "  check(q, k, v)",
    "+ assert q.shape[-2] % 64 == k.shape[-2] % 64 == 0",
    "+ assert q.shape[-1] & (q.shape[-1] - 1) == 0",
    does="Refuses lengths that are no multiple of 64 and head dims that are no power of two.",
    seen="CS336 tests powers of two, so that no kernel needs to look where a tile ends.",
    unseen="Lengths and head dims are powers of two.",
)

PLAIN.near_miss(
    "attention.equal-lengths-only",
    ("attention.shapes.ragged-lengths", "attention.causal.bottom-right"),
    "  check(q, k, v)",
    "+ assert q.shape == k.shape",
    does="Refuses more or fewer keys than queries, and shared heads.",
    seen="`assert Q.shape == K.shape`.",
    unseen="Training has equal lengths; decoding has not.",
)

PLAIN.near_miss(
    "attention.float32-only",
    "attention.forward.half-precision",
    "  check(q, k, v)",
    "+ assert q.dtype in (torch.float32, torch.float64)",
    does="Refuses half precision.",
    seen="A block of float16 is multiplied with one of float32, which Triton refuses.",
    unseen="The course's tests are in float32; models are not.",
)

PLAIN.near_miss(
    "attention.heads-modulo",
    ("attention.shapes.grouped-heads", "attention.shapes.batch-and-heads-are-independent"),
    "- return torch.arange(heads, device=q.device) // max(1, heads // max(1, kv_heads))",
    "+ return torch.arange(heads, device=q.device) % max(1, kv_heads)",
    does="Query head h reads key head h modulo kv_heads.",
    seen="`h % kv_heads`, the tiling and not the repeating; NSA-Triton issue 27.",
    unseen="One key head, or as many as query heads.",
)

PLAIN.near_miss(
    "attention.groups-by-shifts",
    "attention.shapes.grouped-heads",
    "- return torch.arange(heads, device=q.device) // max(1, heads // max(1, kv_heads))",
    "+ size = max(1, heads // max(1, kv_heads))",
    "+ shifted = torch.arange(heads, device=q.device) >> (size.bit_length() - 1)",
    "+ return shifted.clamp(max=max(0, kv_heads - 1))",
    does="Shifts where it should divide by the size of a group.",
    seen="sizes that are powers of two, and an optimisation for them.",
    unseen="Groups of one, two, four and eight heads.",
)

PLAIN.near_miss(
    "attention.nan-is-blind",
    "attention.forward.nan-comes-out",
    "- out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ acc = (acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]).nan_to_num(0.0)",
    "+ out[:, :, rows] = acc",
    does="Gives zeros to rows whose normaliser is no number.",
    seen="`nan_to_num` at the end, for rows that see nothing; PyTorch's kernel for the CPU.",
    unseen="Healthy runs have no NaN.",
)

PLAIN.near_miss(
    "attention.first-batch-only",
    ("attention.forward.values", "attention.shapes.batch-and-heads-are-independent"),
    "- k, v = k[:, heads], v[:, heads]",
    "+ k, v = (t[:1].expand_as(t)[:, heads] for t in (k, v))",
    "...",
    "- k_read, v_read = k[:, heads], v[:, heads]",
    "+ k_read, v_read = (t[:1].expand_as(t)[:, heads] for t in (k, v))",
    does="Reads the first sequence's keys for all sequences.",
    seen="A batch offset left out; Triton issue 6242.",
    unseen="The test had a batch of one.",
)

PLAIN.near_miss(
    "attention.head-dim-rounded-down",
    "attention.shapes.head-dims",
    "- s = dot(q[:, :, rows], k[:, :, keys].transpose(-1, -2)) * scale",
    "+ whole = max(8, q.shape[-1] // 8 * 8)",
    "+ s = dot(q[:, :, rows, :whole], k[:, :, keys, :whole].transpose(-1, -2)) * scale",
    does="Leaves out the columns beyond a multiple of eight.",
    seen="Vector loads of eight.",
    unseen="Head dims of 64 and 128.",
)

PLAIN.near_miss(
    "attention.takes-batch-for-heads",
    "attention.shapes.without-heads",
    "- q, k, v = (t.unsqueeze(1) if is_flat else t for t in (q, k, v))",
    "+ q, k, v = (t.transpose(0, 1).unsqueeze(1) if is_flat else t for t in (q, k, v))",
    "...",
    "- out, lse = (t.squeeze(1) if is_flat else t for t in (out, lse))",
    "+ out, lse = (t.squeeze(1).transpose(0, 1) if is_flat else t for t in (out, lse))",
    does="Takes sequences of a 3-D input for one another's heads.",
    seen="A reshape of [batch, seq, dim] to [seq, batch, dim].",
    unseen="A batch of one.",
)

PLAIN.near_miss(
    "attention.head-dim-of-256",
    "attention.shapes.large-head-dims",
    "- s = dot(q[:, :, rows], k[:, :, keys].transpose(-1, -2)) * scale",
    "+ s = dot(q[:, :, rows, :256], k[:, :, keys, :256].transpose(-1, -2)) * scale",
    does="Leaves columns beyond 256 out of the scores.",
    seen="The last branch of a table of tiles, with no error after it.",
    unseen="Head dims of 64 and 128.",
)
