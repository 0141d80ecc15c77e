"""FlashAttention-2 in Triton: the forward, and what all kernels rely on.

The algorithm is that of `solution.attention.tiled`; here each tile of the output has a program of
its own, and all programs run at once. The backward is in `solution.attention.triton_backward`.

    forward_kernel   a tile of queries passes over the keys     -> out, LSE

Invariants a reader may rely on, here and there:
- One writer: each element of a result is stored once, by one program, and no program reads what
  another one of the same launch wrote. No atomics, so equal inputs give equal bits.
- Causal tiles that nobody sees are not loaded. Tiles that everybody sees have no mask: each pass
  is two loops, and only the one over the diagonal and the ragged end compares.
- In bounds: what lies beyond a sequence, or beyond a head dim that is no power of two, is never
  read; it counts as zero, and where zero would count, as hidden.
- Scores stay base 2 in float32: `exp2(scale * log2(e) * s - m)` is one multiply-add and one
  exponential. Scaling q or k instead would round them once more. scale is positive here.
- Base offsets are int64; within a tile they are int32, which the caller has checked. Strides differ
  per tensor, but the last is 1.
- Products of float32 are three of TF32 each (`tf32x3`): one alone keeps eleven bits.

Pointers with masks instead of tensor descriptors: those need rows aligned to 16 bytes, and block
pointers are gone from Triton 3.9. All of this runs in Triton's interpreter as well.

Paper: Dao 2023, section 3.1. Cost: `solution.attention.tiled`; tiles: `solution.attention.tiles`.
Left out: descriptors and warp specialisation, which would keep the tensor cores busier.

Legend: rows are queries, columns keys, dims the head dim padded to a power of two.
"""

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PLAIN = ["heads", "num_queries", "num_keys"]  # no kernel of their own for 1 or multiples of 16


@triton.jit
def _load(
    pointers, rows, num_rows, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, RAGGED: tl.constexpr
):
    """A tile `[rows, DIMS]`, zeros beyond HEAD_DIM and, if it may be RAGGED, beyond num_rows."""
    if RAGGED:
        inside = rows[:, None] < num_rows
        if HEAD_DIM != DIMS:
            inside &= tl.arange(0, DIMS)[None, :] < HEAD_DIM
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM != DIMS:
        tile = tl.load(pointers, mask=tl.arange(0, DIMS)[None, :] < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _store(pointers, tile, rows, num_rows, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    inside = rows[:, None] < num_rows
    if HEAD_DIM != DIMS:
        inside &= tl.arange(0, DIMS)[None, :] < HEAD_DIM
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _offsets(count: tl.constexpr, stride, DIMS: tl.constexpr):
    """Of a tile's elements from its first one."""
    return tl.arange(0, count)[:, None] * stride + tl.arange(0, DIMS)[None, :]


@triton.jit
def _key_range(
    first, num_queries, num_keys,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """For queries from `first`: where the key tiles end that all see whole, and that any sees."""
    if CAUSAL:
        hidden = num_keys - num_queries
        whole = tl.maximum(0, tl.minimum(num_keys, first + hidden + 1)) // TILE_K * TILE_K
        end = tl.minimum(num_keys, first + TILE_Q + hidden)
    else:
        whole = num_keys // TILE_K * TILE_K
        end = num_keys
    return whole, end


@triton.jit
def _num_visible(rows, num_queries, num_keys, CAUSAL: tl.constexpr):
    """How many keys each query sees: the first ones."""
    if CAUSAL:
        visible = tl.minimum(num_keys, rows + (num_keys - num_queries + 1))
    else:
        visible = tl.zeros_like(rows) + num_keys
    return visible


@triton.jit
def _attend(
    acc, row_sum, row_max, q_tile, k, v, start, num_visible, num_keys, scale_log2,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more tile of keys for the running softmax."""
    columns = start + tl.arange(0, TILE_K)
    k_tile = _load(k, columns, num_keys, HEAD_DIM, DIMS, MASKED)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(columns[None, :] < num_visible[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:  # a row that saw nothing yet: -inf - -inf is NaN, any finite number is right
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    shrink = tl.exp2(row_max - shift)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    v_tile = _load(v, columns, num_keys, HEAD_DIM, DIMS, MASKED)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="tf32x3")
    return acc, row_sum, new_max


@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    q, k, v, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, num_queries, num_keys, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """out `[B, H, Q, D]` and lse `[B, H, Q]`, natural; both contiguous, lse float32."""
    num_tiles = tl.cdiv(num_queries, TILE_Q)
    # Last queries first: with `causal` they take longest, and short ones fill the gaps at the end.
    first = (num_tiles - 1 - tl.program_id(0) % num_tiles) * TILE_Q
    sequence = tl.program_id(0) // num_tiles
    batch, head = (sequence // heads).to(tl.int64), (sequence % heads).to(tl.int64)
    rows = first + tl.arange(0, TILE_Q)
    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    q_tile = _load(q + _offsets(TILE_Q, q_row, DIMS), rows, num_queries, HEAD_DIM, DIMS, True)
    k_offsets, v_offsets = _offsets(TILE_K, k_row, DIMS), _offsets(TILE_K, v_row, DIMS)

    acc = tl.zeros([TILE_Q, DIMS], tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    num_visible = _num_visible(rows, num_queries, num_keys, CAUSAL)
    whole, end = _key_range(first, num_queries, num_keys, TILE_Q, TILE_K, CAUSAL)
    for start in range(0, whole, TILE_K):
        step = tl.cast(start, tl.int64)
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q_tile,
            k + step * k_row + k_offsets, v + step * v_row + v_offsets, start, num_visible,
            num_keys, scale_log2, HEAD_DIM, DIMS, TILE_K, False,
        )  # fmt: skip
    for start in tl.range(whole, end, TILE_K, num_stages=1):
        step = tl.cast(start, tl.int64)
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q_tile,
            k + step * k_row + k_offsets, v + step * v_row + v_offsets, start, num_visible,
            num_keys, scale_log2, HEAD_DIM, DIMS, TILE_K, True,
        )  # fmt: skip

    # A row that saw nothing has 0/0; it is zero, and its LSE -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    place = sequence.to(tl.int64) * num_queries + first
    statistic = (row_max + tl.log2(row_sum)) * LN2
    tl.store(lse + place + tl.arange(0, TILE_Q), statistic, mask=rows < num_queries)
    out += place * HEAD_DIM
    _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, num_queries, HEAD_DIM, DIMS)
