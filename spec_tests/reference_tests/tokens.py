"""Token shards of random words, as bytes: written here without the code that reads them."""

from __future__ import annotations

import random
import struct
from pathlib import Path


def shard(num_tokens: int, *, seed: int, vocabulary: int = 50257) -> bytes:
    """A kjj0 shard: 256 little-endian int32 words, then uint16 tokens."""
    header = struct.pack("<3i", 20240520, 1, num_tokens).ljust(1024, b"\0")
    draw = random.Random(seed)
    return header + struct.pack(
        f"<{num_tokens}H", *(draw.randrange(vocabulary) for _ in range(num_tokens))
    )


def write_shards(folder: Path, num_tokens: int) -> None:
    """Write two training shards of 64 words."""
    folder.mkdir(exist_ok=True)
    for index in range(2):
        data = shard(num_tokens, seed=index, vocabulary=64)
        (folder / f"x_train_{index:06d}.bin").write_bytes(data)
