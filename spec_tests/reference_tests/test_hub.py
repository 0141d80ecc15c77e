"""`python -m solution.data.prepare --hub` against a hub on the loopback, through HF_ENDPOINT."""

import json

import pytest

from spec_tests.reference_tests.hub_server import Hub, serving
from spec_tests.reference_tests.launch import run, run_ranks
from spec_tests.reference_tests.tokens import shard

pytest.importorskip("huggingface_hub")

PREPARE = "solution.data.prepare"
VAL, FIRST, SECOND = (
    "fineweb_val_000000.bin",
    "fineweb_train_000001.bin",
    "fineweb_train_000002.bin",
)


@pytest.fixture
def hub():
    files = {name: shard(3000, seed=seed) for seed, name in enumerate((VAL, FIRST, SECOND))}
    with serving(Hub(files), "kjj0/fineweb10B-gpt2") as hub:
        yield hub


def environment(hub, tmp_path):
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }


def downloads(hub):
    """Names of the shards whose content was asked for, in order."""
    return [name for name in hub.gets() if name.endswith(".bin")]


def fetch(hub, tmp_path, *flags):
    settings = environment(hub, tmp_path)
    hub.requests.clear()
    return run(
        PREPARE, "--hub", "--out", tmp_path / "out", *flags, folder=tmp_path, environment=settings
    )


def fetch_on_two_ranks(hub, tmp_path):
    flags, settings = ("--hub", "--out", tmp_path / "out"), environment(hub, tmp_path)
    return run_ranks(PREPARE, *flags, num_ranks=2, folder=tmp_path, environment=settings)


def arrived(tmp_path):
    return {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.bin")}


def test_shards_arrive_bit_for_bit_and_are_asked_for_once(hub, tmp_path):
    first = fetch(hub, tmp_path)
    asked = downloads(hub)
    again = fetch(hub, tmp_path)

    assert (first.status, again.status) == (0, 0), first.err + again.err
    assert arrived(tmp_path) == {name: hub.files[name] for name in (VAL, FIRST)}
    assert asked == [VAL, FIRST]
    assert hub.requests == []
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["vocab_size"] == 50257
    assert meta["shards"] == {VAL: 3000, FIRST: 3000}
    assert "fetched 2 shards" in first.out
    assert "reused" in again.out


def test_a_broken_connection_and_a_damaged_file_are_mended(hub, tmp_path):
    hub.cut_after[VAL] = 2000
    hub.corrupt.add(FIRST)

    ended = fetch(hub, tmp_path)

    assert ended.status == 0, ended.err
    assert arrived(tmp_path) == {name: hub.files[name] for name in (VAL, FIRST)}
    assert downloads(hub) == [VAL, VAL, FIRST, FIRST]


def test_an_interrupted_download_goes_on_where_it_stopped(hub, tmp_path):
    content = hub.files.pop(SECOND)
    failed = fetch(hub, tmp_path, "--hub-shards", 2)
    hub.files[SECOND] = content
    ended = fetch(hub, tmp_path, "--hub-shards", 2)

    assert failed.status == 2
    assert "fineweb_train_000002.bin" in failed.err
    assert "Traceback" not in failed.err
    assert ended.status == 0, ended.err
    assert downloads(hub) == [SECOND]
    assert arrived(tmp_path) == hub.files


def test_of_two_ranks_the_first_one_downloads(hub, tmp_path):
    ranks = fetch_on_two_ranks(hub, tmp_path)

    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert downloads(hub) == [VAL, FIRST]
    assert "fetched 2 shards" in ranks[0].out
    assert ranks[1].out == ""


def test_a_failed_download_ends_every_rank(hub, tmp_path):
    hub.files.clear()

    ranks = fetch_on_two_ranks(hub, tmp_path)

    assert [rank.status for rank in ranks] == [2, 2], ranks
    assert "fineweb_val_000000.bin" in ranks[0].err
    assert "first rank" in ranks[1].err


def test_what_is_no_shard_is_refused(hub, tmp_path):
    hub.files[FIRST] = b"<html>sorry</html>"

    ended = fetch(hub, tmp_path)

    assert ended.status == 2
    assert "expected a header of 1024 bytes" in ended.err
    assert not (tmp_path / "out/meta.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hub-shards", 104), "hub-shards"),
        (("--vocab-size", 300), "--hub"),
        (("some.txt",), "--hub"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(hub, tmp_path, flags, said):
    ended = fetch(hub, tmp_path, *flags)

    assert ended.status == 2
    assert said in ended.err
    assert hub.requests == []


def test_a_folder_with_other_shards_is_left_alone(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/text_train_000000.bin").write_bytes(shard(10, seed=0))

    ended = fetch(hub, tmp_path)

    assert ended.status == 2
    assert "text_train_000000.bin" in ended.err
    assert hub.requests == []
