"""The reference's reader of shards beyond its clauses: each bit of a header, and what is no file.

Which damaged files any loader refuses is in `spec_tests/chapters/data/test_refusals.py`.
"""

import os
from pathlib import Path

from spec_tests.rig import shards
from spec_tests.tests.reference.launch import solution

RIGHT = shards.shard_bytes(shards.numbered(1, 40))
WORDS = 12  # the bytes of magic, version and count; the header's others are reserved


def messages(ctx, folder: Path) -> dict[str, str]:
    """What is said of everything that is no shard, by the name of the file."""
    for bit in range(8 * WORDS):
        flipped = int.from_bytes(RIGHT, "little") ^ 1 << bit
        (folder / f"bit-{bit}").write_bytes(flipped.to_bytes(len(RIGHT), "little"))
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")  # nobody writes to it
    (folder / "device").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to(folder / "absent")
    said = {}
    for name in (*sorted(path.name for path in folder.iterdir()), "absent"):
        try:
            said[name] = f"read {len(solution('data.shards').Shard(folder / name))} tokens"
        except (ValueError, FileNotFoundError) as error:
            said[name] = str(error)
    return said


def test_what_is_no_shard_is_refused_with_name_place_and_what_was_found(in_rank, tmp_path):
    for name, text in in_rank(messages, tmp_path).items():
        words = [str(tmp_path / name), "expected", "found"]
        words += ["offset"] if (tmp_path / name).is_file() else []
        assert [word for word in words if word not in text] == [], text
