"""Near-misses of how attention is called: strides, storage, buffers, autograd, memory, refusals."""

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.attention")

PLAIN.near_miss(
    "attention.reads-do-as-contiguous",
    (
        "attention.layout.strides",
        "attention.layout.strides-without-heads",
        "attention.layout.strides-of-zero",
    ),
    "  do = torch.zeros_like(out) if do is None else do",
    "+ do = do.as_strided(do.shape, torch.empty(do.shape).stride())",
    does="Reads dO with contiguous strides.",
    seen="flash-attn issue 355; in the study it survived every usual test.",
    unseen="dO made by `randn` is contiguous.",
)

PLAIN.near_miss(
    "attention.strides-of-v-from-k",
    ("attention.layout.strides", "attention.layout.strides-without-heads"),
    "+ v = v.as_strided(v.shape, k.stride()) if k.is_contiguous() else v",
    "  k, v = k[:, heads], v[:, heads]",
    "...",
    "+ v = v.as_strided(v.shape, k.stride()) if k.is_contiguous() else v",
    "  k_read, v_read = k[:, heads], v[:, heads]",
    does="Reads v with the strides of k.",
    seen="`stride_kd` for `stride_vd` in one block pointer, in a solution of CS336.",
    unseen="k and v come from projections alike, or from one that is fused.",
)

PLAIN.near_miss(
    "attention.gradient-like-strides",
    "attention.layout.expanded-keys",
    "+ dk = dk[:1].expand_as(dk).clone() if 0 in k.stride() else dk",
    "+ dv = dv[:1].expand_as(dv).clone() if 0 in v.stride() else dv",
    "  return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)",
    does="Makes dK and dV with the strides of k and v.",
    seen="`empty_strided(k.shape, k.stride())`, with strides of zero.",
    unseen="Expanded keys are rare.",
)

# Loads the last tile of keys whole; weights of zero are to hide what does not belong to it.
PLAIN.near_miss(
    "attention.reads-behind-the-tail",
    "attention.layout.what-lies-around",
    "  heads = key_head_of(q, k)",
    "+ behind = v.storage_offset() + (v.shape[2] - 1) * v.stride(2) + v.shape[3] + 8",
    "+ size = v.untyped_storage().nbytes() // v.element_size()",
    "+ is_there = v.shape[2] % TILE_K and v.numel() and behind + v.shape[3] <= size",
    "+ tail = v.as_strided(v.shape[3:], (1,), behind) if is_there else 0.0",
    "  k, v = k[:, heads], v[:, heads]",
    "...",
    "+ acc = acc + 0.0 * tail",
    "  out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    does="Loads values behind seq_k and multiplies them by zero.",
    seen="A load without a mask; FlashAttention-3 leaks NaN so.",
    unseen="Behind a fresh tensor lie zeros, or nothing.",
)

PLAIN.near_miss(
    "attention.scales-keys-in-place",
    ("attention.layout.inputs-are-kept", "attention.layout.one-tensor-thrice"),
    "- out, lse = forward(q, k, v, causal, scale)",
    "+ scaled = k.detach().mul_(scale or 1.0)",
    "+ out, lse = forward(q, scaled, v, causal, 1.0 if scale else 0.0)",
    "+ scaled.div_(scale or 1.0)",
    does="Multiplies the scale into k and divides it out again.",
    seen="To save one multiplication per score.",
    unseen="The scale is a power of two.",
)

PLAIN.near_miss(
    "attention.leaves-blind-rows",
    "attention.autograd.fills-its-buffers",
    "      lse[:, :, rows] = m + torch.log(norm)",
    "+ blind = max(0, q.shape[2] - k.shape[2]) if causal else 0",
    "+ made = torch.empty_like(out)",
    "+ made[:, :, blind:] = out[:, :, blind:]",
    "+ out = made",
    does="Leaves rows that see nothing as the allocator gave them.",
    seen="`empty_like`, and no program for a tile without work; flash-attn issue 2324.",
    unseen="Fresh memory is zero.",
)

PLAIN.near_miss(
    "attention.tiles-by-turns",
    "attention.autograd.repeatable",
    "- return [keys for keys in tiles(k.shape[2], TILE_K) if keys.start < end]",
    "+ seen = [keys for keys in tiles(k.shape[2], TILE_K) if keys.start < end]",
    "+ return seen[:: -1 if forward.turn % 3 == 1 else 1]",
    "...",
    "  k, v = k[:, heads], v[:, heads]",
    '+ forward.turn = getattr(forward, "turn", 0) + 1',
    does="Sums tiles in an order that changes from call to call.",
    seen="dQ by atomic additions.",
    unseen="The difference is rounding.",
)

PLAIN.near_miss(
    "attention.tiles-by-batch",
    "attention.autograd.batch-invariant",
    "  k, v = k[:, heads], v[:, heads]",
    "+ global TILE_K",
    "+ TILE_K = 32 if q.shape[0] > 1 else 64",
    does="Chooses its tiles by the size of the batch.",
    seen="An autotuner whose key holds the batch.",
    unseen="The difference is rounding.",
)

PLAIN.near_miss(
    "attention.keeps-probabilities",
    (
        "attention.memory.keeps-no-scores",
        "attention.memory.forward-is-linear",
        "attention.memory.peak-is-linear",
    ),
    "+ heads = key_head_of(q, k)",
    "+ out.probabilities = (q.detach() @ k.detach()[:, heads].mT).softmax(-1)",
    "  return (out, lse) if return_lse else out",
    does="Keeps the probabilities after the forward.",
    seen="A tensor kept for a look at the attention map.",
    unseen="The values are right.",
)

PLAIN.near_miss(
    "attention.computes-hidden-tiles",
    "attention.causal.skips-hidden-tiles",
    "- end = rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]",
    "+ end = k.shape[2]",
    does="Computes tiles above the diagonal and masks them.",
    seen="The mask without the loop bound: twice the work.",
    unseen="The values are right.",
)

PLAIN.near_miss(
    "attention.unchecked",
    "attention.refusal.bad-input",
    "- check(q, k, v)",
    "...",
    "- k, v = k[:, heads], v[:, heads]",
    "+ k, v = k[:, heads], v[:, heads, : k.shape[2]]",
    does="Checks nothing.",
    seen="A kernel takes pointers.",
    unseen="Tests pass valid inputs.",
)

PLAIN.near_miss(
    "attention.asserts-without-words",
    "attention.refusal.names-the-argument",
    "- check(q, k, v)",
    "+ try:",
    "+     check(q, k, v)",
    "+ except ValueError:",
    "+     raise AssertionError from None",
    does="Refuses with a bare assertion.",
    seen="`assert q.shape == k.shape`.",
    unseen="It is an error, after all.",
)

PLAIN.near_miss(
    "attention.takes-foreign-pointers",
    "attention.refusal.devices",
    '+ if getattr(k, "device", None) != getattr(q, "device", None):',
    "+     k = torch.zeros_like(k, device=q.device)",
    "  check(q, k, v)",
    does="Takes k from whatever device it lies on.",
    seen="A pointer does not say whose it is.",
    unseen="All tensors of a test lie on one.",
)

PLAIN.near_miss(
    "attention.fails-without-work",
    "attention.shapes.empty",
    "+ if not q.numel():",
    '+     raise RuntimeError("invalid configuration argument")',
    "  k, v = k[:, heads], v[:, heads]",
    does="Fails where there is no element.",
    seen="A grid of zero programs.",
    unseen="Tests have elements.",
)

PLAIN.near_miss(
    "attention.causal-by-default",
    "attention.causal.off-by-default",
    "- def flash_attention(q, k, v, *, causal=False, scale=None, return_lse=False):",
    "+ def flash_attention(q, k, v, *, causal=True, scale=None, return_lse=False):",
    does="Masks the future where the caller says nothing about it.",
    seen="`is_causal=True` in the signature of a public solution.",
    unseen="Tests that pass the flag each time.",
)
