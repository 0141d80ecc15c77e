"""Near-misses of Triton kernels: one changed line of the reference's, judged in the interpreter.

What lies here cannot be seen in PyTorch operations: who writes an element, what a load without a
mask touches, 32 bits of an offset. Where Triton is not installed there is nothing to judge.
"""

from spec_tests.museum.card import Source

LAUNCH = Source("solution.attention.triton_launch", requires="triton")
FORWARD = Source("solution.attention.triton_kernels", requires="triton")
BACKWARD = Source("solution.attention.triton_backward", requires="triton")


LAUNCH.near_miss(
    "attention.kernel-none",
    "attention.forward.launches-a-kernel",
    "- return call(TRITON, q, k, v, causal=causal, scale=scale, return_lse=return_lse)",
    "+ from solution.attention.flash import TILED",
    "+ return call(TILED, q, k, v, causal=causal, scale=scale, return_lse=return_lse)",
    does="Computes in PyTorch operations, under the kernel's name.",
    seen="One class returned for both of CS336's adapters.",
    unseen="The values are right.",
)

FORWARD.near_miss(
    "attention.kernel-tail-into-next-head",
    "attention.kernels.one-writer",
    "- _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, num_queries, HEAD_DIM, DIMS)",
    "+ last = num_queries + tl.where(sequence + 1 < heads, 8, 0)",
    "+ _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, last, HEAD_DIM, DIMS)",
    does="Stores eight rows of the last tile into the next head.",
    seen="A flattened output, and a descriptor that clips at its end alone.",
    unseen="The next head's program comes later in the interpreter, and usually on a device.",
)

FORWARD.near_miss(
    "attention.kernel-reads-a-neighbour",
    "attention.kernels.reads-nothing-of-others",
    "  statistic = (row_max + tl.log2(row_sum)) * LN2",
    "+ last = tl.load(lse + sequence.to(tl.int64) * num_queries + num_queries - 1)",
    "+ statistic += tl.where(last > 0, 0.0, 0.0)",
    does="Reads the log-sum-exp that another program of the launch wrote.",
    seen="Two kernels merged into one: a result that was finished before is now in flight.",
    unseen="The interpreter runs programs in order.",
)

BACKWARD.near_miss(
    "attention.kernel-reads-beyond-the-end",
    "attention.kernels.in-bounds",
    "- row_lse = tl.load(lse + mine, mask=inside, other=0.0)",
    "+ row_lse = tl.load(lse + mine)",
    does="Loads statistics of rows that are not there.",
    seen="The store has the mask, so the load seems to need none.",
    unseen="The extra values are not stored; beyond a small tensor is the allocator's next block.",
)

FORWARD.near_miss(
    "attention.kernel-computes-hidden-tiles",
    ("attention.kernels.work", "attention.causal.skips-hidden-tiles"),
    "- end = tl.minimum(num_keys, first + TILE_Q + hidden)",
    "+ end = num_keys",
    does="Computes tiles above the diagonal and masks them.",
    seen="The mask without the loop bound.",
    unseen="The values are right; it takes twice the time.",
)

FORWARD.near_miss(
    "attention.kernel-causal-strict",
    ("attention.causal.values", "attention.causal.first-row"),
    "- visible = tl.minimum(num_keys, rows + (num_keys - num_queries + 1))",
    "+ visible = tl.minimum(num_keys, rows + (num_keys - num_queries))",
    does="Hides the diagonal too.",
    seen="`>` for `>=` in one of the masks.",
    unseen="The loss still falls.",
)

FORWARD.near_miss(
    "attention.kernel-tf32",
    "attention.kernels.float32-is-float32",
    '- scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")',
    "+ scores = tl.dot(q_tile, tl.trans(k_tile))",
    does="Leaves the precision of the scores' product to `tl.dot`.",
    seen="Its default, in most kernels of students.",
    unseen="The interpreter multiplies in float32; on a device three digits are right.",
)

FORWARD.near_miss(
    "attention.kernel-rows-of-32-bits",
    "attention.layout.offsets-of-64-bits",
    "- k += batch * k_batch + head // GROUP * k_head",
    "+ k += (batch.to(tl.int32) * k_batch.to(tl.int32)).to(tl.int64) + head // GROUP * k_head",
    does="Forms the offset of a batch with 32 bits.",
    seen="Strides of a cache of keys; PyTorch issue 190857.",
    unseen="It takes two thousand million elements.",
    outcomes=("failed", "died"),
)

BACKWARD.near_miss(
    "attention.kernel-backward-starts-late",
    "attention.shapes.ragged-lengths",
    "- begin = tl.maximum(0, first - hidden) // TILE_Q * TILE_Q",
    "+ begin = tl.cdiv(tl.maximum(0, first - hidden), TILE_Q) * TILE_Q",
    does="Begins at the first whole tile of queries that sees a tile of keys.",
    seen="A bound rounded up; the Triton tutorial asserts that one tile divides the other.",
    unseen="Equal lengths and tiles of which one divides the other.",
)
