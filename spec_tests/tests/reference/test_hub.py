"""`python -m solution.data.prepare --hub` against a hub on the loopback, through HF_ENDPOINT."""

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from spec_tests.tests.reference.launch import run
from spec_tests.tests.reference.training import shard

pytest.importorskip("huggingface_hub")

SPLITS = ("val_000000", "train_000001", "train_000002")
VAL, FIRST, SECOND = (f"fineweb_{split}.bin" for split in SPLITS)
COMMIT = "0" * 40
PREFIX = "/datasets/kjj0/fineweb10B-gpt2/resolve/"


@dataclass
class Hub:
    """A hub of one repository on the loopback: the files it serves, and what it was asked for.

    Attributes:
        files: name to content.
        cut_after: names whose next answer breaks off after as many bytes, once each.
        corrupt: names whose next answer has a wrong first byte, once each.
        requests: method and name, in the order of arrival.
    """

    files: dict[str, bytes]
    cut_after: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    endpoint: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Size, hash and commit of a file; of a GET its content, or what is left from a byte on."""
        hub = self.hub
        _, _, name = unquote(self.path).partition(PREFIX)[2].partition("/")
        wanted = self.headers.get("Range", "")
        hub.requests.append((self.command, name))
        content = hub.files.get(name)
        if content is None:
            self._begin(404, {"X-Error-Code": "EntryNotFound", "Content-Length": 0})
            return
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        size, digest = len(content), hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers |= {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {}
        self._begin(206 if start else 200, {**headers, "Content-Length": size - start})
        if self.command == "HEAD":
            return
        if name in hub.corrupt:
            hub.corrupt.discard(name)
            content = bytes([content[0] ^ 255]) + content[1:]
        end = start + hub.cut_after.pop(name, len(content))
        self.wfile.write(content[start:end])
        if end < len(content):
            self.close_connection = True

    do_HEAD = do_GET

    def _begin(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the tests look at `requests`."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub({name: shard(3000, seed=seed) for seed, name in enumerate((VAL, FIRST, SECOND))})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, hub)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()


def downloads(hub):
    """Names of the shards whose content was asked for, in order."""
    return [n for method, n in hub.requests if method == "GET" and n.endswith(".bin")]


def fetch(hub, tmp_path, *flags, **expected):
    """Run the command."""
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }
    hub.requests.clear()
    flags, place = ("--hub", "--out", tmp_path / "out", *flags), {"folder": tmp_path}
    return run("solution.data.prepare", *flags, environment=environment, **place, **expected)


def arrived(tmp_path):
    return {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.bin")}


def test_shards_arrive_bit_for_bit_and_are_asked_for_once(hub, tmp_path):
    first = fetch(hub, tmp_path)
    asked = downloads(hub)
    again = fetch(hub, tmp_path)

    assert arrived(tmp_path) == {name: hub.files[name] for name in (VAL, FIRST)}
    assert asked == [VAL, FIRST]
    assert hub.requests == []
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["vocab_size"] == 50257
    assert meta["shards"] == {VAL: 3000, FIRST: 3000}
    assert "2 shards, 3,000 train and 3,000 val tokens" in first.out
    assert again.out.split(" in ")[0] == first.out.split(" in ")[0]


def test_a_broken_connection_and_a_damaged_file_are_mended(hub, tmp_path):
    hub.cut_after[VAL] = 2000
    hub.corrupt.add(FIRST)

    fetch(hub, tmp_path)

    assert arrived(tmp_path) == {name: hub.files[name] for name in (VAL, FIRST)}
    assert downloads(hub) == [VAL, VAL, FIRST, FIRST]


def test_an_interrupted_download_goes_on_where_it_stopped(hub, tmp_path):
    content = hub.files.pop(SECOND)
    fetch(hub, tmp_path, "--hub-shards", 2, status=2, says=SECOND)
    hub.files[SECOND] = content
    (tmp_path / "out" / VAL).write_bytes(hub.files[VAL][:-2])  # there, and not whole
    fetch(hub, tmp_path, "--hub-shards", 2)

    assert downloads(hub) == [VAL, SECOND]
    assert arrived(tmp_path) == hub.files


def test_what_is_no_shard_is_refused(hub, tmp_path):
    hub.files[FIRST] = b"<html>sorry</html>"

    fetch(hub, tmp_path, status=2, says="expected a header of 1024 bytes")

    assert not (tmp_path / "out/meta.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hub-shards", 104), "hub-shards"),
        (("--vocab-size", 300), "--hub"),
        (("some.txt",), "--hub"),
        ((), "text_train_000000.bin"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(hub, tmp_path, flags, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/text_train_000000.bin").write_bytes(shard(10, seed=0))  # another's

    fetch(hub, tmp_path, *flags, status=2, says=said)

    assert hub.requests == []
