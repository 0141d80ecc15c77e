"""Text to shards: what is made anew, what is removed, and what a tokenizer may have seen."""

import os

import numpy as np
import pytest
from tokenizers import Tokenizer

from solution.data.prepare import DELIMITER, DataConfig, prepare
from solution.data.shards import Shard, find_shards, write_atomically, write_shard

CONFIG = DataConfig(vocab_size=300, shard_tokens=400, val_fraction=0.25)


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


def test_the_same_request_is_reused_and_any_other_is_made_anew(texts, tmp_path):
    out = tmp_path / "out"
    _, was_there = prepare([texts], out, CONFIG)
    first = contents(out)
    assert not was_there
    assert prepare([texts], out, CONFIG)[1]
    assert contents(out) == first

    wider = DataConfig(vocab_size=300, shard_tokens=100_000, val_fraction=0.25)
    meta, was_there = prepare([texts], out, wider)
    assert not was_there
    # The first had more shards: none of them is left beside those of the second.
    assert sorted(meta["shards"]) == sorted(path.name for path in out.glob("*.bin"))
    assert len(meta["shards"]) < sum(name.endswith(".bin") for name in first)

    damaged = find_shards(out, "train")[0]
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert not prepare([texts], out, wider)[1], "a damaged shard is no finished run"
    (texts / "0.txt").write_text("other words")
    assert not prepare([texts], out, wider)[1]


def test_the_tokenizer_has_not_seen_the_validation_documents(texts, tmp_path):
    meta, _ = prepare([texts], tmp_path / "out", CONFIG)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    assert len(tokenizer.encode("zyxwv").ids) == 5, "a merge of a word that training never has"
    assert len(tokenizer.encode(" spain").ids) == 1
    held = np.concatenate(
        [Shard(p).read(0, len(Shard(p))) for p in find_shards(tmp_path / "out", "val")]
    )
    assert held[0] == tokenizer.token_to_id(DELIMITER)
    texts_held = tokenizer.decode(held.tolist(), skip_special_tokens=False).split(DELIMITER)[1:]
    assert texts_held == [(texts / f"{n}.txt").read_text() for n in (3, 7)]
    assert meta["vocab_size"] <= CONFIG.vocab_size


@pytest.mark.parametrize("ids", [[0, 65536], [-1, 0], np.array([1, 70_000])], ids=str)
def test_ids_that_uint16_cannot_hold_are_refused_and_nothing_is_written(ids, tmp_path):
    with pytest.raises(ValueError, match="65536"):
        write_shard(tmp_path / "x_train_0.bin", ids)
    assert not contents(tmp_path)


def test_shards_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        write_shard(tmp_path / f"x_train_{number}.bin", [number])
    assert [path.stem for path in find_shards(tmp_path, "train")] == [
        f"x_train_{n}" for n in (1, 9, 10)
    ]


def test_what_a_killed_write_leaves_is_taken_for_no_shard(tmp_path, monkeypatch):
    write_shard(tmp_path / "x_train_0.bin", [1, 2])
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append([*tmp_path.iterdir()]))
    write_atomically(tmp_path / "x_train_1.bin", b"half")
    during = [path for path in seen[0] if path.name != "x_train_0.bin"]
    assert during, "the temporary file lies beside its target while it is written"
    assert not [path for path in during if path.suffix == ".bin"]
