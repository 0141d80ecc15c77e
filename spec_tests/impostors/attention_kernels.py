"""Near-misses of Triton kernels: one changed line of the reference's, judged in the interpreter.

What lies here cannot be seen in PyTorch operations: who writes an element, what a load without a
mask touches, 32 bits of an offset. Where Triton is not installed there is nothing to judge.
"""

from __future__ import annotations

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_attention import PlainAttention, offer

FORWARD = "solution.attention.triton_kernels"
BACKWARD = "solution.attention.triton_backward"


def _card(
    words: str,
    patch: tuple[str, str, str],
    does: str,
    seen: str,
    unseen: str,
    *rejected_by: str,
    outcomes: tuple[str, ...] = ("failed",),
) -> Impostor:
    return Impostor(
        f"attention.kernel-{words}",
        does,
        seen,
        unseen,
        rejected_by,
        patches=(patch,),
        requires="triton",
        outcomes=outcomes,
    )


IMPOSTORS = (
    Impostor(
        "attention.kernel-none",
        "Computes in PyTorch operations, under the kernel's name.",
        "One class returned for both of CS336's adapters.",
        "The values are right.",
        ("attention.forward.launches-a-kernel",),
        functions=lambda: {"flash_attention_triton": offer(PlainAttention)["flash_attention"]},
        requires="triton",
    ),
    _card(
        "tail-into-next-head",
        (
            FORWARD,
            "    _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, num_queries, "
            "HEAD_DIM, DIMS)\n",
            "    last = num_queries + tl.where(sequence + 1 < heads, 8, 0)\n"
            "    _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, last, HEAD_DIM, DIMS)\n",
        ),
        "Stores eight rows of the last tile into the next head.",
        "A flattened output, and a descriptor that clips at its end alone.",
        "The next head's program comes later in the interpreter, and usually on a device.",
        "attention.kernels.one-writer",
    ),
    _card(
        "reads-a-neighbour",
        (
            FORWARD,
            "    statistic = (row_max + tl.log2(row_sum)) * LN2\n",
            "    statistic = (row_max + tl.log2(row_sum)) * LN2\n"
            "    last = tl.load(lse + sequence.to(tl.int64) * num_queries + num_queries - 1)\n"
            "    statistic += tl.where(last > 0, 0.0, 0.0)\n",
        ),
        "Reads the log-sum-exp that another program of the launch wrote.",
        "Two kernels merged into one: what was finished before is now in flight.",
        "The interpreter runs programs in order.",
        "attention.kernels.reads-nothing-of-others",
    ),
    _card(
        "reads-beyond-the-end",
        (
            BACKWARD,
            "    row_lse = tl.load(lse + mine, mask=inside, other=0.0)\n",
            "    row_lse = tl.load(lse + mine)\n",
        ),
        "Loads statistics of rows that are not there.",
        "The store has the mask, so the load seems to need none.",
        "What is read is never stored; beyond a small tensor lies the allocator's next block.",
        "attention.kernels.in-bounds",
    ),
    _card(
        "computes-hidden-tiles",
        (
            FORWARD,
            "        end = tl.minimum(num_keys, first + TILE_Q + hidden)\n",
            "        end = num_keys\n",
        ),
        "Computes tiles above the diagonal and masks them.",
        "The mask without the loop bound.",
        "The values are right; it takes twice the time.",
        "attention.kernels.work",
        "attention.causal.skips-hidden-tiles",
    ),
    _card(
        "causal-strict",
        (
            FORWARD,
            "        visible = tl.minimum(num_keys, rows + (num_keys - num_queries + 1))\n",
            "        visible = tl.minimum(num_keys, rows + (num_keys - num_queries))\n",
        ),
        "Hides the diagonal too.",
        "`>` for `>=` in one of the masks.",
        "The loss still falls.",
        "attention.causal.values",
        "attention.causal.first-row",
    ),
    _card(
        "scores-twice",
        (
            FORWARD,
            '    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")\n',
            '    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")\n'
            "    again = tl.dot(q_tile, tl.trans(k_tile), scores)\n"
            "    scores = 0.5 * again\n",
        ),
        "Computes the scores of a tile twice.",
        "One pass for the maximum and one for the sum, in a kernel that has both.",
        "The values are right.",
        "attention.kernels.work",
    ),
    _card(
        "blind-tile-is-nan",
        (
            FORWARD,
            '        shift = tl.where(new_max == float("-inf"), 0.0, new_max)\n',
            "        shift = new_max\n",
        ),
        "Subtracts -inf from -inf in a tile where a row sees nothing.",
        "flash-attn, vLLM issue 4405: a first tile that is hidden for some rows.",
        "With equal lengths the first tile of keys is seen by all.",
        "attention.blind-rows.zeros",
    ),
    _card(
        "heads-modulo",
        (
            FORWARD,
            "    k += batch * k_batch + head // GROUP * k_head\n",
            "    k += batch * k_batch + head % (heads // GROUP) * k_head\n",
        ),
        "The forward reads k of head h modulo kv_heads, and v as it should.",
        "One of four places that say which head is read.",
        "One key head, or as many as query heads.",
        "attention.shapes.grouped-heads",
    ),
    _card(
        "tail-counts",
        (
            FORWARD,
            "        whole = num_keys // TILE_K * TILE_K\n",
            "        whole = tl.cdiv(num_keys, TILE_K) * TILE_K\n",
        ),
        "Passes over the ragged last tile of keys without a mask.",
        "A ceiling for a floor.",
        "Lengths that are multiples of the tile.",
        "attention.shapes.ragged-lengths",
        outcomes=("failed", "died"),
    ),
    _card(
        "rows-of-32-bits",
        (
            FORWARD,
            "    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row\n"
            "    k += batch * k_batch + head // GROUP * k_head\n",
            "    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row\n"
            "    k += (batch.to(tl.int32) * k_batch.to(tl.int32)).to(tl.int64) "
            "+ head // GROUP * k_head\n",
        ),
        "Forms the offset of a batch with 32 bits.",
        "Strides of a cache of keys; PyTorch issue 190857.",
        "It takes two thousand million elements.",
        "attention.layout.offsets-of-64-bits",
        outcomes=("failed", "died"),
    ),
    _card(
        "backward-starts-late",
        (
            BACKWARD,
            "        begin = tl.maximum(0, first - hidden) // TILE_Q * TILE_Q\n",
            "        begin = tl.cdiv(tl.maximum(0, first - hidden), TILE_Q) * TILE_Q\n",
        ),
        "Begins at the first whole tile of queries that sees a tile of keys.",
        "A bound rounded up; the Triton tutorial asserts that one tile divides the other.",
        "Equal lengths and tiles of which one divides the other.",
        "attention.shapes.ragged-lengths",
    ),
    _card(
        "ignores-strides-of-do",
        (
            BACKWARD,
            "    dout += batch * dout_batch + head * dout_head + first.to(tl.int64) * dout_row\n"
            "    q_tile = _load(",
            "    dout += (batch * heads + head) * num_queries * HEAD_DIM "
            "+ first.to(tl.int64) * HEAD_DIM\n"
            "    dout_row = HEAD_DIM\n"
            "    q_tile = _load(",
        ),
        "Reads dO as if it were contiguous, in the kernel of dQ alone.",
        "flash-attn issue 355; the Triton tutorial asserts equal strides.",
        "dO made by `randn` is contiguous.",
        "attention.layout.strides",
        outcomes=("failed", "died"),
    ),
)
