"""Token shards: one file of token ids, in the format of kjj0/fineweb10B-gpt2.

    byte 0                    1024                             1024 + 2 * count
    +-------------------------+--------------------------------+
    | 256 int32 words         | count tokens, uint16           |  and there the file ends
    | 20240520, 1, count, 0.. |                                |
    +-------------------------+--------------------------------+
    everything little-endian, whatever the machine

1. `write_shard` checks every id *before* it narrows to uint16 (a cast wraps 70000 to 4464 without a
   word), writes a temporary file beside the target, flushes it to disk and renames it: a reader
   sees the old file, no file or the whole file, never a part.
2. `Shard(path)` trusts nothing: magic, version, count and exact size are checked when it is
   opened, so that a truncated download fails at once and not in hour three on one rank of eight.
3. `Shard.read` is a positioned read of what was asked for. A memory map that is held adds the whole
   shard to resident memory over an epoch, and was slower.

Counts and offsets are Python ints: a sum over 103 shards of 10^8 tokens does not fit 32 bits.
The format is Karpathy's (llm.c, dev/data/data_common.py).
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC, VERSION = 20240520, 1
HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * 4
MAX_TOKENS = 2**31 - 1  # the count is an int32
NUM_IDS = 2**16  # a token is a uint16
CHUNK = 2**22  # tokens that are checked at a time

Tokens = npt.NDArray[np.uint16]


class Shard:
    """A token file, checked; holds no descriptor between reads.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a file, or not a complete shard of version 1; the message names the file,
            the byte offset, what was expected and found, and what to do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.num_tokens = _check_header(self.path)

    def __len__(self) -> int:
        return self.num_tokens

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start + count) as a read-only uint16 array.

        Raises:
            ValueError: the range is not in the shard, or the file has shrunk since it was opened.
        """
        if not 0 <= start <= start + count <= self.num_tokens:
            raise ValueError(
                f"{self.path}: expected a range inside [0, {self.num_tokens}), "
                f"got [{start}, {start + count})"
            )
        data = _read_at(self.path, HEADER_BYTES + 2 * start, 2 * count)
        if len(data) != 2 * count:
            raise ValueError(
                f"{self.path}: expected {2 * count} bytes at offset {HEADER_BYTES + 2 * start}, "
                f"found {len(data)}; the file was changed while it was being read, "
                "stop what writes to it and start again"
            )
        return np.frombuffer(data, dtype="<u2")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a ValueError if a model of `vocab_size` words cannot embed an id (1 G tokens/s).

        Raises:
            ValueError: names the first such id, its token index and its byte offset.
        """
        for start in range(0, self.num_tokens, CHUNK):
            tokens = self.read(start, min(CHUNK, self.num_tokens - start))
            if tokens.max() < vocab_size:
                continue
            index = start + int(np.argmax(tokens >= vocab_size))
            raise ValueError(
                f"{self.path}: expected ids below the vocabulary size {vocab_size}, found "
                f"{int(tokens[index - start])} as token {index} (byte {HEADER_BYTES + 2 * index}); "
                "use the tokenizer that made this shard, or a model with more words"
            )


def _check_header(path: Path) -> int:
    """Return the number of tokens in `path`, once all about its header and size is right."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: expected a token shard, found no such file; "
            "`python -m solution.data.prepare --out DIR` makes some"
        )
    if not path.is_file():  # opening a pipe waits for its writer
        found = "a directory" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path}: expected a token shard, found {found}; name the .bin files")

    def require(holds: bool, expected: str, offset: int, found: object, advice: str) -> None:
        if not holds:
            raise ValueError(
                f"{path}: expected {expected} at offset {offset}, found {found}; {advice}"
            )

    head = _read_at(path, 0, HEADER_BYTES)
    require(
        len(head) == HEADER_BYTES,
        f"a header of {HEADER_BYTES} bytes",
        0,
        f"{len(head)} bytes in the whole file",
        "the download or the write was cut short, make it again",
    )
    # The other 253 words are reserved and not looked at.
    magic, version, count = (int(word) for word in np.frombuffer(head, dtype="<i4")[:3])
    is_swapped = int(np.array(magic, dtype="<i4").byteswap()) == MAGIC
    swapped = "it is byte-swapped: it was written on a big-endian machine without saying '<i4'"
    hint = swapped if is_swapped else "it is no kjj0 / llm.c token shard"
    require(magic == MAGIC, f"magic {MAGIC}", 0, magic, hint)
    hint = "convert the file, other versions hold other tokens"
    require(version == VERSION, f"version {VERSION} (uint16 tokens)", 4, version, hint)
    hint = f"the writer overflowed int32, cut the tokens into shards of at most {MAX_TOKENS}"
    require(count >= 0, "a token count >= 0", 8, count, hint)
    size, expected = path.stat().st_size, HEADER_BYTES + 2 * count
    verb = "cut short" if size < expected else "extended, or its header was not updated"
    claimed = f"{expected} bytes for the {count} tokens that its header claims"
    require(size == expected, claimed, 8, size, f"the file was {verb}, make or fetch it again")
    return count


def _read_at(path: Path, offset: int, num_bytes: int) -> bytes:
    """Return up to `num_bytes` from `offset`; fewer only at the end of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def write_shard(path: str | os.PathLike[str], tokens: npt.ArrayLike) -> int:
    """Write `tokens` as a shard, completely or not at all; returns how many there were.

    Args:
        path: the target; replaced if it exists. Its folder must exist.
        tokens: a 1-D integer array or sequence, each 0 <= id < 65536.

    Raises:
        ValueError: an id out of range (names it and its index), not 1-D, not integers, or too many.
            Whatever is at `path` stays as it was.
    """
    ids = _as_ids(tokens)
    header = np.zeros(HEADER_WORDS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(ids)
    write_atomically(Path(path), header.tobytes(), ids.astype("<u2").data)
    return len(ids)


def _as_ids(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """`tokens` as a 1-D integer array in which every id fits uint16."""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"expected tokens to be 1-D, got shape {ids.shape}; flatten them")
    if len(ids) == 0:
        return np.empty(0, dtype=np.uint16)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expected integer tokens within int64, got dtype {ids.dtype}")
    if len(ids) > MAX_TOKENS:
        raise ValueError(
            f"expected at most {MAX_TOKENS} tokens per shard, got {len(ids)}; cut them"
        )
    wrong = (ids < 0) | (ids >= NUM_IDS)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(
            f"expected token ids in [0, {NUM_IDS}), got {int(ids[index])} at index {index}; "
            "the format stores uint16, use a vocabulary of at most 65536 words"
        )
    return ids


def write_atomically(path: Path, *pieces: bytes | memoryview) -> None:
    """Write `pieces` to `path`: to a temporary file beside it, flushed to disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # else the rename may reach the disk before the bytes do
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename durable: a name is an entry of its folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_own_folder(folder: Path, names: str) -> list[Path]:
    """Return the shards in `folder`; ValueError unless all match the regular expression `names`.

    Raises:
        ValueError: there are others.
    """
    shards = sorted(folder.glob("*.bin"))
    foreign = [path.name for path in shards if not re.fullmatch(names, path.name)]
    if foreign:
        raise ValueError(
            f"{folder}: expected a folder of our own, found {foreign[:3]}; training would mix them "
            "in, choose another --out"
        )
    return shards


def find_shards(folder: str | os.PathLike[str], split: str) -> list[Path]:
    """The shards of `split` ("train" or "val") in `folder`, in natural order of their names.

    A word of the file's own name decides: `/data/train/pretrain_val_000000.bin` is validation data.

    Raises:
        ValueError: no folder, or no such shard in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: expected a folder with *_{split}_*.bin shards, found none; "
            f"`python -m solution.data.prepare --out {folder}` makes one"
        )
    found = [p for p in folder.glob("*.bin") if split in re.split(r"[^a-z]+", p.name)]
    if not found:
        raise ValueError(
            f"{folder}: expected *_{split}_*.bin shards, found none among "
            f"{sorted(path.name for path in folder.glob('*.bin'))}"
            + "; prepare with --val-fraction above 0, or train without --eval-every"
            * (split == "val")
        )
    # Runs of digits count as numbers: x10 comes after x9.
    return sorted(
        found,
        key=lambda path: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", path.name)],
    )
