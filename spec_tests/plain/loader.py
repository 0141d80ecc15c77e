"""Batches of token sequences out of shard files, divided among ranks.

Problem: each rank reads its own part of the data, no token twice, and can resume in the middle.

Idea: number all sequences of all shards once. Which ones belong to batch i of rank r is arithmetic,
so ranks agree without a message, and the whole state is a count of batches.

Steps
    1. Read each file's header (llm.c's format: 1024 bytes, then uint16 tokens) and check its size.
    2. A shard of n tokens holds (n - 1) // length sequences; each overlaps the next by one token,
       since targets are inputs shifted by one.
    3. Batch i of rank r is the sequences from (i * ranks + r) * batch_size on.
    4. Read each row with NumPy, return int64 inputs and targets that own their memory.

Use
    loader = PlainLoader(paths, batch_size=2, length=8, rank=0, size=2)
    for inputs, targets in loader:          # [2, 8] each, int64
        ...

Cost: one small read per row, and nothing held between batches.

Source: the loader of llm.c and of nanoGPT's `.bin` files; sequences never cross shards here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEADER_BYTES = 1024
Batch = tuple[torch.Tensor, torch.Tensor]


class PlainLoader:
    """One global list of sequences; batch i of rank r is a slice of it."""

    def __init__(
        self, paths: Any, batch_size: int, length: int, rank: int | None, size: int | None
    ) -> None:
        self.batch_size, self.length = batch_size, length
        self.rank, self.size = rank_and_size(rank, size)
        self.paths = [Path(path) for path in paths]
        if batch_size < 1 or length < 1:
            raise ValueError(f"expected sizes > 0, got {batch_size} and {length}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"expected a rank below {self.size}, got {self.rank}")
        if not self.paths:
            raise ValueError("expected at least one file")
        self.counts = [tokens_in(path) for path in self.paths]
        self.begin = self.yielded = 0

    # --------------------------------------------------------------------------------- reading

    def sequences_in(self, count: int) -> int:
        return max(0, count - 1) // self.length

    def num_sequences(self) -> int:
        return sum(self.sequences_in(count) for count in self.counts)

    def num_batches(self) -> int:
        return self.num_sequences() // (self.batch_size * self.size)

    def row(self, number: int) -> np.ndarray:
        """Return the tokens of a global sequence, and the one after them."""
        for path, count in zip(self.paths, self.counts, strict=True):
            held = self.sequences_in(count)
            if number < held:
                offset = HEADER_BYTES + 2 * number * self.length
                return np.fromfile(path, dtype="<u2", count=self.length + 1, offset=offset)
            number -= held
        raise IndexError(number)

    def batch(self, index: int) -> Batch:
        first = (index * self.size + self.rank) * self.batch_size
        numbers = range(first, first + self.batch_size)
        rows = torch.from_numpy(np.stack([self.row(n).astype(np.int64) for n in numbers]))
        return rows[:, :-1].clone(), rows[:, 1:].clone()

    # -------------------------------------------------------------------------------- one pass

    def __iter__(self) -> Iterator[Batch]:
        begin, self.begin = self.begin, 0
        self.yielded = begin
        return self.walk(begin)

    def walk(self, begin: int) -> Iterator[Batch]:
        for index in range(begin, self.num_batches()):
            batch = self.batch(index)
            self.yielded = index + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.yielded = state["batches"]

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class of loaders."""

        def token_loader(paths, *, batch_size, sequence_length, rank=None, world_size=None):
            return cls(paths, batch_size, sequence_length, rank, world_size)

        return {"token_loader": token_loader}


def rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return both as given, or as RANK and WORLD_SIZE say; one process where nothing does."""
    if rank is not None and size is not None:
        return rank, size
    if rank is not None or size is not None:
        raise ValueError(f"expected rank and world_size or neither, got {rank} and {size}")
    found = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]
    if found == [None, None]:
        return 0, 1
    if None in found:
        raise ValueError(f"expected RANK and WORLD_SIZE, got {found}")
    return int(str(found[0])), int(str(found[1]))


def tokens_in(path: Path) -> int:
    """Return the number of tokens in the file.

    Raises:
        ValueError: the file is none of this format, or is longer or shorter than its header says.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path}: a header of {len(head)} bytes")
    magic, version, count = struct.unpack("<3i", head[:12])
    if (magic, version) != (20240520, 1):
        raise ValueError(f"{path}: expected 20240520 and 1, got {magic} and {version}")
    size = path.stat().st_size
    if size != HEADER_BYTES + 2 * count:
        raise ValueError(f"{path}: {size} bytes do not hold {count} tokens exactly")
    return int(count)
