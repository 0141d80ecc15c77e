"""Text to shards: what is made anew, what a tokenizer may have seen, and what is no shard."""

import os
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from spec_tests.rig import shards
from spec_tests.tests.reference.launch import on_ranks, solution

SETTINGS = {"vocab_size": 300, "shard_tokens": 400, "val_fraction": 0.25}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        # Every fourth document, which is validation data, has a word of its own.
        word = "zyxwv" if number % 4 == 3 else "the rain in spain"
        (folder / f"{number}.txt").write_text(f"{number}: {word} " * 40)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepared(texts, out, **changes):
    """What `meta.json` says."""
    return solution("data.prepare").prepare([texts], out, **{**SETTINGS, **changes})


@on_ranks(1)
def test_the_same_request_gives_the_same_bytes_and_old_shards_go(ctx, texts, tmp_path):
    out = tmp_path / "out"
    prepared(texts, out)
    first = contents(out)
    prepared(texts, out)
    assert contents(out) == first

    meta = prepared(texts, out, shard_tokens=100_000)
    # The first had more shards: none of them is left beside those of the second.
    assert sorted(meta["shards"]) == sorted(path.name for path in out.glob("*.bin"))
    assert len(meta["shards"]) < sum(name.endswith(".bin") for name in first)


@on_ranks(1)
def test_the_tokenizer_has_not_seen_the_validation_documents(ctx, texts, tmp_path):
    shards, out = solution("data.shards"), tmp_path / "out"
    prepared(texts, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert len(tokenizer.encode("zyxwv").ids) == 5, "a merge of a word that training never has"
    assert len(tokenizer.encode(" spain").ids) == 1
    opened = [shards.Shard(path) for path in shards.find_shards(out, "val")]
    held = np.concatenate([shard.read(0, len(shard)) for shard in opened])
    delimiter = solution("data.prepare").DELIMITER
    documents = tokenizer.decode(held.tolist(), skip_special_tokens=False).split(delimiter)
    assert documents == ["", *((texts / f"{n}.txt").read_text() for n in (3, 7))]


def decoded(out, split):
    """The text of a split, documents parted by the delimiter."""
    shards = solution("data.shards")
    opened = [shards.Shard(path) for path in shards.find_shards(out, split)]
    ids = np.concatenate([shard.read(0, len(shard)) for shard in opened])
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


TEXT = "".join(f"{number}: the rain in spain\n" for number in range(20_000))  # beyond 400 kB


@on_ranks(1)
def test_a_single_text_however_long_is_cut_and_its_end_validates(ctx, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "mytext.txt").write_text(TEXT)
    prepared(tmp_path / "mytext.txt", out, shard_tokens=10**6)
    mark = solution("data.prepare").DELIMITER
    train, val = (decoded(out, split).removeprefix(mark) for split in ("train", "val"))
    assert train + val == TEXT
    assert len(val) == len(TEXT) // 4
    assert len(TEXT) > solution("data.prepare").MAX_DOCUMENT_BYTES


@on_ranks(1)
def test_a_file_that_is_no_text_is_skipped_and_does_not_end_the_collection(ctx, texts, tmp_path):
    (texts / "0-binary.txt").write_bytes(b"\xff" * 10_000)
    meta = prepared(texts, tmp_path / "out", max_bytes=9_000)
    assert (meta["num_documents"], meta["num_skipped"]) == (8, 1)
    half = sum(path.stat().st_size for path in texts.glob("[0-3].txt"))
    assert prepared(texts, tmp_path / "half", max_bytes=half)["num_documents"] == 4
    with pytest.raises(ValueError, match="max_bytes to be a positive integer, got 0"):
        prepared(texts, tmp_path / "out", max_bytes=0)


@on_ranks(1)
def test_ids_that_uint16_cannot_hold_are_refused_and_nothing_is_written(ctx, tmp_path):
    for ids in ([0, 65536], [-1, 0], np.array([1, 70_000])):
        with pytest.raises(ValueError, match="65536"):
            solution("data.shards").write_shard(tmp_path / "x_train_0.bin", ids)
    assert not contents(tmp_path)


@on_ranks(1)
def test_shards_are_in_the_order_of_their_numbers(ctx, tmp_path):
    shards = solution("data.shards")
    for number in (10, 9, 1):
        shards.write_shard(tmp_path / f"x_train_{number}.bin", [number])
    names = [path.stem for path in shards.find_shards(tmp_path, "train")]
    assert names == [f"x_train_{number}" for number in (1, 9, 10)]


@on_ranks(1)
def test_what_a_killed_write_leaves_is_taken_for_no_shard(ctx, tmp_path):
    seen = []

    def look(descriptor):
        seen.append([path.name for path in tmp_path.iterdir()])

    with mock.patch.object(os, "fsync", side_effect=look):
        solution("data.shards").write_atomically(tmp_path / "x_train_1.bin", b"half")
    assert seen[0], "the temporary file lies beside its target while it is written"
    assert not [name for name in seen[0] if name.endswith(".bin")]


# ------------------------------------------------------------------------------------------- shards

# Each bit of a header, and what is no file. Damaged files that any loader refuses: chapter data.
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
