"""The text to train on: files below some folders, in one order on every machine.

By default the sources of Python's own standard library, without tests: about 11 MB of real text
that every machine has, with no network. Folders that hold other people's packages are skipped, and
so are files that are not UTF-8 or so large that they are tables rather than text; how many is
reported.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
SUFFIXES = {".py", ".txt", ".md"}
MAX_DOCUMENT_BYTES = 400_000  # beyond that it is a generated table, not text


@dataclass(frozen=True)
class Corpus:
    """Documents in order, and a hash of all of them."""

    documents: list[str]
    fingerprint: str
    num_bytes: int
    num_skipped: int  # too large, or not UTF-8

    @classmethod
    def collect(cls, paths: Sequence[Path], *, max_bytes: int | None) -> Corpus:
        """Read the documents below `paths` (default: the standard library), up to `max_bytes`.

        Raises:
            ValueError: a path that is not there, or no text at all.
        """
        digest, documents, num_bytes, num_skipped = hashlib.sha256(), [], 0, 0
        for path in _files(paths):
            data = path.read_bytes()
            text = _decode(data)
            if not text:
                num_skipped += bool(data)
                continue
            if max_bytes is not None and num_bytes + len(data) > max_bytes:
                break
            digest.update(len(data).to_bytes(8, "little") + data)
            documents.append(text)
            num_bytes += len(data)
        if not documents:
            raise ValueError(
                f"expected text ({', '.join(sorted(SUFFIXES))} files) below "
                f"{[str(path) for path in paths] or 'the standard library'}, found none"
                + (f" within max_bytes={max_bytes}; raise it" if max_bytes else "")
            )
        return cls(documents, digest.hexdigest(), num_bytes, num_skipped)

    def split(self, val_fraction: float) -> tuple[list[str], list[str]]:
        """(train, val) documents; val is spread evenly, and not empty if it can be."""
        is_val = [
            int((i + 1) * val_fraction) > int(i * val_fraction) for i in range(len(self.documents))
        ]
        if val_fraction and len(is_val) > 1 and not any(is_val):
            is_val[-1] = True
        marked = list(zip(self.documents, is_val, strict=True))
        return [text for text, held in marked if not held], [text for text, held in marked if held]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The text files at or below `paths`, sorted below each; default the standard library."""
    for path in paths or [Path(sysconfig.get_path("stdlib"))]:
        if path.is_file():
            yield path
        elif path.is_dir():
            found = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
            # as_posix: one order on every system, whatever separates folders there.
            for file in sorted(found, key=lambda file: file.relative_to(path).as_posix()):
                folders = file.relative_to(path).parts[:-1]
                if file.is_file() and SKIPPED_FOLDERS.isdisjoint(folders):
                    yield file
        else:
            raise ValueError(f"{path}: expected a text file or a folder of them, found neither")


def _decode(data: bytes) -> str:
    """The text of a document; empty if it is too large or not UTF-8."""
    if len(data) > MAX_DOCUMENT_BYTES:
        return ""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
