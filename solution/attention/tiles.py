"""Which tiles each kernel works in: a table, by head dim and width of the dtype.

A tile that is too large spills: what registers cannot hold goes to memory and back in every step,
and costs more than a large tile saves. No row spills on an H100 or H200 but those of `dkdv` and
`dq` in float32 with head dim 256, and all fit into shared memory.
`spec_tests.tests.reference.compiled` compiles them without a GPU;
`spec_tests/bench/results/attention_compiled.txt` has all rows as they were compiled on 2026-11-21,
before any later change of this table.
A table and no tuning at run time: equal inputs give equal bits in every process.

Products of tiles with 64 rows and more are `wgmma`, Hopper's widest; where accumulators
`[keys, 256]` leave no room for that, `mma`. Chosen by registers, from what compiles to the fewest.
"""

from dataclasses import dataclass

import torch

LARGEST_TILE = 256  # rows; offsets within a tile are 32 bits
DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of one tile, warps of one program, tiles in flight."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By kernel and bytes of an element: tiles for head dims up to 64, up to 128, up to 256.
TABLE: dict[tuple[str, int], tuple[Tiles, Tiles, Tiles]] = {
    ("forward", 2): (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ("dkdv", 2): (Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3), Tiles(64, 32, 8, 2)),
    ("dq", 2): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 16, 8, 2)),
    ("forward", 4): (Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(16, 16, 8, 2)),
    ("dkdv", 4): (Tiles(16, 128, 8, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 8, 2)),
    ("dq", 4): (Tiles(128, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 16, 8, 2)),
}


def choose(kernel: str, dims: int, dtype: torch.dtype, *, interpreted: bool = False) -> Tiles:
    """The tiles of `kernel` (forward, dkdv or dq) for heads of `dims`, which is padded.

    >>> choose("forward", 128, torch.bfloat16)
    Tiles(queries=128, keys=64, num_warps=8, num_stages=3)
    """
    if interpreted:
        # Each tile costs the same few milliseconds there: unequal, so that mixing up the two is an
        # error, and so small that short sequences have several.
        return Tiles(32, 64, 4, 1) if kernel == "dkdv" else Tiles(64, 32, 4, 1)
    to_64, to_128, to_256 = TABLE[kernel, dtype.itemsize]
    return to_64 if dims <= 64 else to_128 if dims <= 128 else to_256


def delta_queries(dims: int) -> int:
    """Queries of one program of the delta kernel, which holds two tiles and no product."""
    return min(128, 8192 // dims)


def padded(head_dim: int) -> int:
    """The power of two that a tile is wide; products need 16.

    >>> [padded(dims) for dims in (8, 16, 80, 256)]
    [16, 16, 128, 256]
    """
    return max(16, 1 << (head_dim - 1).bit_length())
