"""The reference's reader of shards beyond its clauses: each bit of a header, and what is no file.

Which damaged files any loader refuses is in `spec_tests/chapters/data/test_refusals.py`.
"""

import os

import pytest

from spec_tests.rig import shards
from spec_tests.tests.reference.launch import on_ranks, solution

RIGHT = shards.shard_bytes(shards.numbered(1, 40))
WORDS = 12  # the bytes of magic, version and count; the header's others are reserved


@on_ranks(1)
def test_what_is_no_shard_is_refused_with_name_place_and_what_was_found(ctx, tmp_path):
    for bit in range(8 * WORDS):
        flipped = int.from_bytes(RIGHT, "little") ^ 1 << bit
        (tmp_path / f"bit-{bit}").write_bytes(flipped.to_bytes(len(RIGHT), "little"))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for path in (*sorted(tmp_path.iterdir()), tmp_path / "absent"):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            solution("data.shards").Shard(path)
        words = [str(path), "expected", "found", *["offset"] * path.is_file()]
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
