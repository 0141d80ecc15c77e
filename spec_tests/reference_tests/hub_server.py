"""A hub of one repository on the loopback: what the client's HF_ENDPOINT can be pointed at."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0" * 40


@dataclass
class Hub:
    """The files it serves, and what it was asked for.

    Attributes:
        files: name to content.
        cut_after: names whose next answer breaks off after as many bytes, once each.
        corrupt: names whose next answer has a wrong first byte, once each.
        requests: (method, name, Range header or "") in the order of arrival.
        endpoint: for HF_ENDPOINT.
    """

    files: dict[str, bytes]
    cut_after: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    endpoint: str = ""

    def gets(self) -> list[str]:
        """Names whose content was asked for, in order."""
        return [name for method, name, _ in self.requests if method == "GET"]


class _Server(ThreadingHTTPServer):
    """Knows what it serves, and under which prefix."""

    def __init__(self, hub: Hub, repository: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.prefix = hub, f"/datasets/{repository}/resolve/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        """Size, hash and commit of a file."""
        self._answer(with_content=False)

    def do_GET(self) -> None:
        """The same and the content, or what is left of it from a byte on."""
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        hub = self.server.hub
        _, _, name = unquote(self.path).partition(self.server.prefix)[2].partition("/")
        wanted = self.headers.get("Range", "")
        hub.requests.append((self.command, name, wanted))
        content = hub.files.get(name)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self._say(content, start)
        if not with_content:
            return
        if name in hub.corrupt:
            hub.corrupt.discard(name)
            content = bytes([content[0] ^ 255]) + content[1:]
        end = start + hub.cut_after.pop(name, len(content))
        self.wfile.write(content[start:end])
        if end < len(content):
            self.close_connection = True

    def _say(self, content: bytes, start: int) -> None:
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the tests look at `requests`."""


@contextmanager
def serving(hub: Hub, repository: str) -> Iterator[Hub]:
    """Serve `hub` as the dataset `repository` on a free port until the block ends."""
    server = _Server(hub, repository)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
