"""The backward of FlashAttention-2 in Triton: three kernels that share no sum.

    delta_kernel   a tile of queries                        -> delta = dO . O - dLSE; LSE, base 2
    dkdv_kernel    a tile of keys passes over the queries   -> dK, dV
    dq_kernel      a tile of queries passes over the keys   -> dQ

Formulas: `solution.attention.tiled`. dK/dV and dQ make the scores of a tile each for themselves, by
`exp2(scale * log2(e) * s - LSE)`: seven products instead of five, and nobody waits for or adds to
what another program has written. dK/dV works on transposed scores, keys by queries: these are
operands of the next product as they lie in registers, and the sum over the query heads of a key
head is one loop around the pass.

Each pass is two loops, with masks over the diagonal and the ragged end, without them elsewhere. The
masked ones are short, and one tile in flight saves them registers.

Invariants and legend: `solution.attention.triton_kernels`.
"""

import triton
import triton.language as tl

from solution.attention.triton_kernels import (
    LOG2E,
    PLAIN,
    _key_range,
    _load,
    _num_visible,
    _offsets,
    _store,
)


@triton.jit(do_not_specialize=PLAIN)
def delta_kernel(
    dout, out, lse, dlse, delta, lse2, dout_batch, dout_head, dout_row, heads, num_queries,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_Q: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """What the other two need of each query: delta, and its LSE in base 2, +inf if it saw nothing.

    exp2(s - inf) is 0, so such a query, and one beyond the end, gives and gets nothing.
    """
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    first = tl.program_id(0) % num_tiles * TILE_Q
    sequence = tl.program_id(0) // num_tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    rows = first + tl.arange(0, TILE_Q)
    place = sequence.to(tl.int64) * num_queries + first
    dout += batch * dout_batch + head * dout_head + first.to(tl.int64) * dout_row
    out += place * HEAD_DIM
    dout_tile = _load(
        dout + _offsets(TILE_Q, dout_row, DIMS), rows, num_queries, HEAD_DIM, DIMS, True
    )
    out_tile = _load(
        out + _offsets(TILE_Q, HEAD_DIM, DIMS), rows, num_queries, HEAD_DIM, DIMS, True
    )
    row_delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    mine, inside = place + tl.arange(0, TILE_Q), rows < num_queries
    if HAS_DLSE:
        row_delta -= tl.load(dlse + mine, mask=inside, other=0.0)
    tl.store(delta + mine, row_delta, mask=inside)
    row_lse = tl.load(lse + mine, mask=inside, other=0.0)
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
    tl.store(lse2 + mine, row_lse, mask=inside)


@triton.jit
def _load_row(pointers, rows, num_rows, beyond, RAGGED: tl.constexpr):
    if RAGGED:
        row = tl.load(pointers, mask=rows < num_rows, other=beyond)
    else:
        row = tl.load(pointers)
    return row


@triton.jit
def _gather(
    dk, dv, k_tile, v_tile, q, dout, lse2, delta, start, first_seeing, num_queries, scale_log2,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to dK and dV. Transposed, keys are rows of the scores."""
    rows = start + tl.arange(0, TILE_Q)
    q_tile = _load(q, rows, num_queries, HEAD_DIM, DIMS, MASKED)
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(rows[None, :] >= first_seeing[:, None], scores, float("-inf"))
    row_lse = _load_row(lse2 + rows, rows, num_queries, float("inf"), MASKED)
    weights = tl.exp2(scores * scale_log2 - row_lse[None, :])
    dout_tile = _load(dout, rows, num_queries, HEAD_DIM, DIMS, MASKED)
    dv = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv, input_precision="tf32x3")
    dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision="tf32x3")
    row_delta = _load_row(delta + rows, rows, num_queries, 0.0, MASKED)
    dscores = weights * (dweights - row_delta[None, :])
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision="tf32x3")
    return dk, dv


@triton.jit
def _query_range(
    first, columns, num_queries, num_keys,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """For keys from `first`: the first query that sees each, and three ends of query tiles.

    From the second on some see a key, from the third on all see all, from the last on there is
    less than a tile. What lies between second and third is masked; that is all of it where keys are
    missing, since their scores count as zeros, of which exp2 may overflow.
    """
    ragged = num_queries // TILE_Q * TILE_Q
    clear = tl.where(first + TILE_K > num_keys, ragged, 0)
    if CAUSAL:
        hidden = num_keys - num_queries
        first_seeing = columns - hidden
        begin = tl.maximum(0, first - hidden) // TILE_Q * TILE_Q
        whole = tl.cdiv(tl.maximum(0, first + TILE_K - 1 - hidden), TILE_Q) * TILE_Q
        clear = tl.maximum(begin, tl.minimum(ragged, tl.maximum(clear, whole)))
    else:
        first_seeing = tl.where(columns < num_keys, 0, num_queries)
        begin = 0
    return first_seeing, begin, clear, ragged


@triton.jit(do_not_specialize=PLAIN)
def dkdv_kernel(
    q, k, v, dout, lse2, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, heads, num_queries, num_keys, scale, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dk and dv `[B, G, K, D]`, contiguous: sums over the GROUP heads that share a key head."""
    num_tiles = tl.cdiv(num_keys, TILE_K)
    first = tl.program_id(0) % num_tiles * TILE_K  # with `causal`, the keys that most see first
    sequence = tl.program_id(0) // num_tiles  # batch and key head
    key_heads = heads // GROUP
    batch, key_head = (sequence // key_heads).to(tl.int64), (sequence % key_heads).to(tl.int64)
    columns = first + tl.arange(0, TILE_K)
    k += batch * k_batch + key_head * k_head + first.to(tl.int64) * k_row
    v += batch * v_batch + key_head * v_head + first.to(tl.int64) * v_row
    k_tile = _load(k + _offsets(TILE_K, k_row, DIMS), columns, num_keys, HEAD_DIM, DIMS, True)
    v_tile = _load(v + _offsets(TILE_K, v_row, DIMS), columns, num_keys, HEAD_DIM, DIMS, True)
    q_offsets, dout_offsets = _offsets(TILE_Q, q_row, DIMS), _offsets(TILE_Q, dout_row, DIMS)

    first_seeing, begin, clear, ragged = _query_range(
        first, columns, num_queries, num_keys, TILE_Q, TILE_K, CAUSAL
    )
    num_masked = (clear - begin) // TILE_Q + (ragged < num_queries).to(tl.int32)

    dk_acc = tl.zeros([TILE_K, DIMS], tl.float32)
    dv_acc = tl.zeros([TILE_K, DIMS], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_mine = q + batch * q_batch + head * q_head
        dout_mine = dout + batch * dout_batch + head * dout_head
        place = (batch * heads + head) * num_queries
        for index in tl.range(num_masked, num_stages=1):
            start = begin + index * TILE_Q
            start = tl.where(start < clear, start, ragged)
            step = start.to(tl.int64)
            dk_acc, dv_acc = _gather(
                dk_acc, dv_acc, k_tile, v_tile, q_mine + step * q_row + q_offsets,
                dout_mine + step * dout_row + dout_offsets, lse2 + place, delta + place, start,
                first_seeing, num_queries, scale_log2, HEAD_DIM, DIMS, TILE_Q, True,
            )  # fmt: skip
        for start in range(clear, ragged, TILE_Q):
            step = tl.cast(start, tl.int64)
            dk_acc, dv_acc = _gather(
                dk_acc, dv_acc, k_tile, v_tile, q_mine + step * q_row + q_offsets,
                dout_mine + step * dout_row + dout_offsets, lse2 + place, delta + place, start,
                first_seeing, num_queries, scale_log2, HEAD_DIM, DIMS, TILE_Q, False,
            )  # fmt: skip

    mine = (sequence.to(tl.int64) * num_keys + first) * HEAD_DIM + _offsets(TILE_K, HEAD_DIM, DIMS)
    _store(dk + mine, dk_acc * scale, columns, num_keys, HEAD_DIM, DIMS)
    _store(dv + mine, dv_acc, columns, num_keys, HEAD_DIM, DIMS)


@triton.jit
def _pull(
    dq, q_tile, dout_tile, k, v, row_lse, row_delta, start, num_visible, num_keys, scale_log2,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dQ."""
    columns = start + tl.arange(0, TILE_K)
    k_tile = _load(k, columns, num_keys, HEAD_DIM, DIMS, MASKED)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(columns[None, :] < num_visible[:, None], scores, float("-inf"))
    weights = tl.exp2(scores * scale_log2 - row_lse[:, None])
    v_tile = _load(v, columns, num_keys, HEAD_DIM, DIMS, MASKED)
    dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision="tf32x3")
    dscores = weights * (dweights - row_delta[:, None])
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision="tf32x3")


@triton.jit(do_not_specialize=PLAIN)
def dq_kernel(
    q, k, v, dout, lse2, delta, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, heads, num_queries, num_keys, scale, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq `[B, H, Q, D]`, contiguous."""
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    first = (num_tiles - 1 - tl.program_id(0) % num_tiles) * TILE_Q  # as in the forward
    sequence = tl.program_id(0) // num_tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    rows = first + tl.arange(0, TILE_Q)
    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    dout += batch * dout_batch + head * dout_head + first.to(tl.int64) * dout_row
    q_tile = _load(q + _offsets(TILE_Q, q_row, DIMS), rows, num_queries, HEAD_DIM, DIMS, True)
    dout_tile = _load(
        dout + _offsets(TILE_Q, dout_row, DIMS), rows, num_queries, HEAD_DIM, DIMS, True
    )
    k_offsets, v_offsets = _offsets(TILE_K, k_row, DIMS), _offsets(TILE_K, v_row, DIMS)
    place = sequence.to(tl.int64) * num_queries + first
    mine, inside = place + tl.arange(0, TILE_Q), rows < num_queries
    row_lse = tl.load(lse2 + mine, mask=inside, other=float("inf"))
    row_delta = tl.load(delta + mine, mask=inside, other=0.0)

    acc = tl.zeros([TILE_Q, DIMS], tl.float32)
    num_visible = _num_visible(rows, num_queries, num_keys, CAUSAL)
    whole, end = _key_range(first, num_queries, num_keys, TILE_Q, TILE_K, CAUSAL)
    for start in range(0, whole, TILE_K):
        step = tl.cast(start, tl.int64)
        acc = _pull(
            acc, q_tile, dout_tile, k + step * k_row + k_offsets, v + step * v_row + v_offsets,
            row_lse, row_delta, start, num_visible, num_keys, scale_log2,
            HEAD_DIM, DIMS, TILE_K, False,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE_K, num_stages=1):
        step = tl.cast(start, tl.int64)
        acc = _pull(
            acc, q_tile, dout_tile, k + step * k_row + k_offsets, v + step * v_row + v_offsets,
            row_lse, row_delta, start, num_visible, num_keys, scale_log2,
            HEAD_DIM, DIMS, TILE_K, True,
        )  # fmt: skip
    _store(
        dq + place * HEAD_DIM + _offsets(TILE_Q, HEAD_DIM, DIMS),
        acc * scale, rows, num_queries, HEAD_DIM, DIMS,
    )  # fmt: skip
