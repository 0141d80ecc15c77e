"""Near-misses of Triton kernels: one changed line of the reference's, judged in the interpreter.

What lies here cannot be seen in PyTorch operations: who writes an element, what a load without a
mask touches, 32 bits of an offset. Where Triton is not installed there is nothing to judge.
"""

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.attention import PlainAttention


@near_miss("attention.kernel-none", rejected_by="attention.forward.launches-a-kernel")
class KernelNone(PlainAttention):
    """Computes in PyTorch operations, under the kernel's name.

    From: One class returned for both of CS336's adapters.
    Unseen: The values are right.
    """

    requires = "triton"

    @classmethod
    def functions(cls):
        return {"flash_attention_triton": super().functions()["flash_attention"]}


class ForwardKernel(Patched):
    """A changed line of the forward's kernel."""

    module = "solution.attention.triton_kernels"
    requires = "triton"


class BackwardKernel(Patched):
    """A changed line of the backward's kernels."""

    module = "solution.attention.triton_backward"
    requires = "triton"


@near_miss("attention.kernel-tail-into-next-head", rejected_by="attention.kernels.one-writer")
class TailIntoNextHead(ForwardKernel):
    """Stores eight rows of the last tile into the next head.

    From: A flattened output, and a descriptor that clips at its end alone.
    Unseen: The next head's program comes later in the interpreter, and usually on a device.
    """

    find = (
        "    _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, num_queries, "
        "HEAD_DIM, DIMS)\n"
    )
    replace = (
        "    last = num_queries + tl.where(sequence + 1 < heads, 8, 0)\n"
        "    _store(out + _offsets(TILE_Q, HEAD_DIM, DIMS), acc, rows, last, HEAD_DIM, DIMS)\n"
    )


@near_miss(
    "attention.kernel-reads-a-neighbour", rejected_by="attention.kernels.reads-nothing-of-others"
)
class ReadsANeighbour(ForwardKernel):
    """Reads the log-sum-exp that another program of the launch wrote.

    From: Two kernels merged into one: what was finished before is now in flight.
    Unseen: The interpreter runs programs in order.
    """

    find = "    statistic = (row_max + tl.log2(row_sum)) * LN2\n"
    replace = (
        "    statistic = (row_max + tl.log2(row_sum)) * LN2\n"
        "    last = tl.load(lse + sequence.to(tl.int64) * num_queries + num_queries - 1)\n"
        "    statistic += tl.where(last > 0, 0.0, 0.0)\n"
    )


@near_miss("attention.kernel-reads-beyond-the-end", rejected_by="attention.kernels.in-bounds")
class ReadsBeyondTheEnd(BackwardKernel):
    """Loads statistics of rows that are not there.

    From: The store has the mask, so the load seems to need none.
    Unseen: What is read is never stored; beyond a small tensor lies the allocator's next block.
    """

    find = "    row_lse = tl.load(lse + mine, mask=inside, other=0.0)\n"
    replace = "    row_lse = tl.load(lse + mine)\n"


@near_miss(
    "attention.kernel-computes-hidden-tiles",
    rejected_by=("attention.kernels.work", "attention.causal.skips-hidden-tiles"),
)
class ComputesHiddenTiles(ForwardKernel):
    """Computes tiles above the diagonal and masks them.

    From: The mask without the loop bound.
    Unseen: The values are right; it takes twice the time.
    """

    find = "        end = tl.minimum(num_keys, first + TILE_Q + hidden)\n"
    replace = "        end = num_keys\n"


@near_miss(
    "attention.kernel-causal-strict",
    rejected_by=("attention.causal.values", "attention.causal.first-row"),
)
class CausalStrict(ForwardKernel):
    """Hides the diagonal too.

    From: `>` for `>=` in one of the masks.
    Unseen: The loss still falls.
    """

    find = "        visible = tl.minimum(num_keys, rows + (num_keys - num_queries + 1))\n"
    replace = "        visible = tl.minimum(num_keys, rows + (num_keys - num_queries))\n"


@near_miss("attention.kernel-tf32", rejected_by="attention.kernels.float32-is-float32")
class ScoresInTf32(ForwardKernel):
    """Leaves the precision of the scores' product to `tl.dot`.

    From: Its default, in most kernels of students.
    Unseen: The interpreter multiplies in float32; on a device three digits are right.
    """

    find = '    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")\n'
    replace = "    scores = tl.dot(q_tile, tl.trans(k_tile))\n"


@near_miss("attention.kernel-blind-tile-is-nan", rejected_by="attention.blind-rows.zeros")
class BlindTileIsNan(ForwardKernel):
    """Subtracts -inf from -inf in a tile where a row sees nothing.

    From: flash-attn, vLLM issue 4405: a first tile that is hidden for some rows.
    Unseen: With equal lengths the first tile of keys is seen by all.
    """

    find = '        shift = tl.where(new_max == float("-inf"), 0.0, new_max)\n'
    replace = "        shift = new_max\n"


@near_miss(
    "attention.kernel-rows-of-32-bits",
    rejected_by="attention.layout.offsets-of-64-bits",
    outcomes=("failed", "died"),
)
class RowsOf32Bits(ForwardKernel):
    """Forms the offset of a batch with 32 bits.

    From: Strides of a cache of keys; PyTorch issue 190857.
    Unseen: It takes two thousand million elements.
    """

    find = (
        "    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row\n"
        "    k += batch * k_batch + head // GROUP * k_head\n"
    )
    replace = (
        "    q += batch * q_batch + head * q_head + first.to(tl.int64) * q_row\n"
        "    k += (batch.to(tl.int32) * k_batch.to(tl.int32)).to(tl.int64) "
        "+ head // GROUP * k_head\n"
    )


@near_miss("attention.kernel-backward-starts-late", rejected_by="attention.shapes.ragged-lengths")
class BackwardStartsLate(BackwardKernel):
    """Begins at the first whole tile of queries that sees a tile of keys.

    From: A bound rounded up; the Triton tutorial asserts that one tile divides the other.
    Unseen: Equal lengths and tiles of which one divides the other.
    """

    find = "        begin = tl.maximum(0, first - hidden) // TILE_Q * TILE_Q\n"
    replace = "        begin = tl.cdiv(tl.maximum(0, first - hidden), TILE_Q) * TILE_Q\n"
