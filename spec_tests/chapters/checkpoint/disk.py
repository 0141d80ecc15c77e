"""What may happen to a disk, made to happen: crashes at every moment, full disks, damaged files.

Nothing here knows how an implementation lays out its files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import torch

from spec_tests.rig.ranks.world import Ranks, World

_CHANGES = frozenset(
    f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")
)


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A fresh folder for one run of bodies, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="trainspec-disk-") as path:
        yield str(Path(path) / "checkpoints")


def in_folder(world: World, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Ranks:
    """`World.run` of a body whose first argument is a fresh folder."""
    with folder() as directory:
        return world.run(body, directory, *args, **kwargs)


Contents = dict[str, tuple[int, ...]]


def contents(directory: str | Path) -> Contents:
    """Every file below a folder with what tells its content from another."""
    found: Contents = {}
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file() and not path.is_symlink():
            facts = path.stat()
            file = str(path.relative_to(directory))
            found[file] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


class CrashImages:
    """Copies of a folder as a process killed at that moment would leave it.

    Within the block, each time before this process opens a file to write, renames or removes
    something there, the folder is copied. A file that was written since the copy before is also
    shown half written: the kill may have come in the middle of it.
    """

    def __init__(self, watched: str, into: str) -> None:
        self.watched, self.into = Path(watched), Path(into)
        self.images: list[tuple[str, str]] = []
        self._known: Contents = {}
        self._is_copying = False

    def __enter__(self) -> CrashImages:
        self.into.mkdir(parents=True)
        self._known = contents(self.watched)
        time.sleep(0.01)  # file times have the grain of a clock tick
        _WATCHERS.append(self)
        _install_hook()
        return self

    def __exit__(self, *details: object) -> None:
        _WATCHERS.remove(self)
        self._take("at the end")

    def saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called before an operation of this process."""
        if self._is_copying or not self._concerns(event, arguments):
            return
        self._is_copying = True  # what the copying does is no business of ours
        try:
            self._take(f"killed before {event} {Path(os.fsdecode(arguments[0])).name}")
        finally:
            self._is_copying = False

    def _concerns(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return False
        elif event not in _CHANGES:
            return False
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return False
        path = Path(os.fsdecode(arguments[0])).absolute()
        return path.is_relative_to(self.watched.resolve())

    def _take(self, where: str) -> None:
        listing = contents(self.watched)
        inodes = {entry[0] for entry in self._known.values()}
        written = [
            path
            for path, entry in listing.items()
            if self._known.get(path) != entry
            and not (self._known.get(path, (0,))[0] != entry[0] and entry[0] in inodes)
        ]
        self._known = listing
        self._copy(where, None)
        for path in written:
            self._copy(f"{where}, {Path(path).name} half written", path)

    def _copy(self, where: str, half: str | None) -> None:
        image = self.into / str(len(self.images))
        shutil.copytree(self.watched, image, symlinks=True)
        if half is not None:
            os.truncate(image / half, (image / half).stat().st_size // 2)
        self.images.append((where, str(image)))


_WATCHERS: list[CrashImages] = []


@cache
def _install_hook() -> None:
    # An audit hook cannot be taken out again; without watchers it does nothing.
    sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    for watcher in tuple(_WATCHERS):
        watcher.saw(event, arguments)


@contextlib.contextmanager
def full_disk(*, after_bytes: int | None) -> Iterator[None]:
    """Within the block no file of this process grows beyond that; writing more is an OSError.

    The limit is the system's own, so whatever library writes meets it. With None what was written
    cannot be renamed: a save that ends with it fails at its end.
    """
    if after_bytes is None:
        full = OSError(errno.ENOSPC, "no space for another name")
        with mock.patch.multiple(os, rename=Mock(side_effect=full), replace=Mock(side_effect=full)):
            yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Trap:
    """An object whose unpickling writes a file: code that came out of a checkpoint has run."""

    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.witness,))


def damaged(directory: str, file: str, how: str, into: str) -> str:
    """A copy of a folder in which one file is "cut" in half, "emptied", "removed" or "flipped".

    Of "flipped at 0.5" one bit is, in the middle; much of a file may be padding. A "pickle W" or an
    "archive W", in torch.save's form, would create the folder W if it were unpickled.
    """
    shutil.copytree(directory, into, symlinks=True)
    path = Path(into) / file
    kind, _, rest = how.partition(" ")  # the name of a folder may hold a space
    data = bytearray(path.read_bytes())
    if kind == "removed":
        path.unlink()
    elif kind == "archive":
        with path.open("wb") as stream:  # by its name torch would refuse a hidden file
            torch.save({"state": Trap(rest)}, stream)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Trap(rest), protocol=2).ljust(len(data), b"\0"))
    elif kind == "flipped":
        if data:  # an empty file has no bit, and may be a mark
            data[int(len(data) * float(rest.removeprefix("at ")))] ^= 0x10
        path.write_bytes(data)
    else:
        os.truncate(path, len(data) // 2 if kind == "cut" else 0)
    return into
