"""Token shards, written by the suite itself as the contract defines them: right and damaged ones.

A numbered shard says where each of its tokens stands: token `position` of shard `index` has the id
`1000 * index + position`. What a loader yields can therefore be read off without a table, and a
sequence that crosses from one shard into the next shows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
STRIDE = 1000  # ids per numbered shard: longer ones would look like their neighbours


def shard_bytes(tokens: Iterable[int], *, count: int | None = None) -> bytes:
    """A shard in memory; `count` is what its header claims, the truth if left out."""
    ids = list(tokens)
    words = struct.pack("<3i", MAGIC, VERSION, len(ids) if count is None else count)
    return words.ljust(HEADER_BYTES, b"\0") + struct.pack(f"<{len(ids)}H", *ids)


def numbered(index: int, length: int) -> range:
    """The tokens of numbered shard `index`."""
    if not 0 <= length <= STRIDE:
        raise ValueError(f"expected 0 <= length <= {STRIDE}, got {length}")
    return range(STRIDE * index, STRIDE * index + length)


def write_numbered(folder: Path, lengths: Iterable[int]) -> list[Path]:
    """Numbered shards of these lengths, one file each."""
    paths = []
    for index, length in enumerate(lengths):
        paths.append(folder / f"shard_{index:03}.bin")
        paths[-1].write_bytes(shard_bytes(numbered(index, length)))
    return paths


def place(token: int) -> str:
    """Where a token of a numbered shard stands, in words."""
    return f"shard {token // STRIDE} token {token % STRIDE}"


def write_sparse(path: Path, count: int, tail: Iterable[int]) -> Path:
    """A shard of `count` tokens, all zero but the last ones; zeros take no room on most disks."""
    ids = list(tail)
    with path.open("wb") as file:
        file.write(shard_bytes([], count=count))
        file.truncate(HEADER_BYTES + 2 * count)
        file.seek(HEADER_BYTES + 2 * (count - len(ids)))
        file.write(struct.pack(f"<{len(ids)}H", *ids))
    return path


def _replace_word(index: int, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        return data[: 4 * index] + struct.pack("<i", value) + data[4 * index + 4 :]

    return change


def _swap_bytes(data: bytes) -> bytes:
    words, tokens = data[:HEADER_BYTES], data[HEADER_BYTES:]
    swapped = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return swapped + b"".join(tokens[i : i + 2][::-1] for i in range(0, len(tokens), 2))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "foreign-magic": _replace_word(0, 20240801),
    "later-version": _replace_word(1, 2),
    "earlier-version": _replace_word(1, 0),
    "negative-count": _replace_word(2, -1),
    "huge-count": _replace_word(2, 2**31 - 1),
    "count-too-small": _replace_word(2, 7),
    "one-byte-short": lambda data: data[:-1],
    "one-token-short": lambda data: data[:-2],
    "half": lambda data: data[: HEADER_BYTES + (len(data) - HEADER_BYTES) // 4 * 2],
    "one-byte-long": lambda data: data + b"\1",
    "one-token-long": lambda data: data + b"\1\0",
    "header-alone": lambda data: data[:HEADER_BYTES],
    "short-header": lambda data: data[:700],
    "three-words": lambda data: data[:12],
    "empty": lambda data: b"",
    "byte-swapped": _swap_bytes,
    "text": lambda data: b"It was the best of times, it was the worst of times. " * 40,
}
"""What happens to files: name to what becomes of the bytes of a right shard."""

NO_FILES = ("missing", "directory")
"""Paths at which there is no file at all."""


def write_damaged(path: Path, damage: str, length: int = 40) -> Path:
    """What was once numbered shard 1 of `length` tokens."""
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(DAMAGES[damage](shard_bytes(numbered(1, length))))
    return path
