"""The reference's reader of shards beyond its clauses: every bit of a file, and what is no file.

Which damaged files any loader refuses is in `spec_tests/data/test_refusals.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from spec_tests.reference_tests.launch import solution
from spec_tests.rig import shards

COUNT = 40
RIGHT = shards.shard_bytes(shards.numbered(1, COUNT))
WORDS = 12  # the bytes of magic, version and count; the header's others are reserved


def flipped(bit: int) -> bytes:
    """The right shard with one bit turned over."""
    data = bytearray(RIGHT)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def messages(ctx, folder: Path) -> dict[str, str]:
    """What is said of everything that is no shard, by the name of the file."""
    damaged = {name: change(RIGHT) for name, change in shards.DAMAGES.items()}
    damaged |= {f"bit-{bit}": flipped(bit) for bit in range(8 * WORDS)}
    for name, data in damaged.items():
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")  # nobody writes to it
    (folder / "device").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to(folder / "absent")
    said = {}
    for name in (*damaged, "folder", "pipe", "device", "nowhere", "absent"):
        try:
            said[name] = f"read {len(solution('data.shards').Shard(folder / name))} tokens"
        except ValueError as error:
            said[name] = str(error)
    return said


def test_what_is_no_shard_is_refused_with_name_place_and_what_was_found(in_rank, tmp_path):
    for name, text in in_rank(messages, tmp_path).items():
        words = [str(tmp_path / name), "expected", "found"]
        words += ["offset"] if (tmp_path / name).is_file() else []
        assert [word for word in words if word not in text] == [], text


def misread(ctx, folder: Path) -> list[int]:
    """The bits beyond the three words with which a shard is not read as it is."""
    wrong, path = [], folder / "flipped"
    for bit in range(8 * WORDS, 8 * len(RIGHT), 5):
        path.write_bytes(data := flipped(bit))
        tokens = solution("data.shards").Shard(path).read(0, COUNT)
        if tokens.tolist() != np.frombuffer(data[shards.HEADER_BYTES :], "<u2").tolist():
            wrong.append(bit)
    return wrong


def test_a_bit_in_a_token_is_another_token_and_one_in_the_reserved_header_is_nothing(
    in_rank, tmp_path
):
    assert in_rank(misread, tmp_path) == []
