"""Right but unusual ways to save and load: every clause up to level `correct` must accept these."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_checkpoint import PlainCheckpoint, offer, size


class FolderPerStep(PlainCheckpoint):
    """A new folder for each save, renamed when it is whole; the pointer is moved after that."""

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(root / "partial", ignore_errors=True)
        (root / "partial").mkdir()
        for part, value in state.items():
            torch.save(value, root / "partial" / f"{part}.pt")
        final = root / f"step-{step}-{time.time_ns()}"
        (root / "partial").rename(final)
        (root / "latest.tmp").write_text(final.name)
        (root / "latest.tmp").replace(root / "latest")

    def newest(self, root: Path) -> Path | None:
        pointer = root / "latest"
        return root / pointer.read_text() if pointer.exists() else None

    def read(self, path: Path) -> dict[str, Any]:
        parts = ("step", "model", "optimizer", "ranks")
        return {part: torch.load(path / f"{part}.pt", weights_only=True) for part in parts}


class Marked(FolderPerStep):
    """Writes in a thread, under the final name; an empty file says that all is there."""

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.write, root / f"{step:08}-{time.time_ns()}", state).result()

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        for part, value in state.items():
            torch.save(value, folder / f"{part}.pt")
        (folder / "complete").touch()

    def newest(self, root: Path) -> Path | None:
        return max((marker.parent for marker in root.glob("*-*/complete")), default=None)


class ZeroForNone(PlainCheckpoint):
    """Returns 0 where there is nothing, and talks through a barrier and a file of errors."""

    def none(self, directory: Any) -> int:
        return 0

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        super().put(root, step, state)
        descriptor = os.open(root, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def tell(self, error: str | None) -> None:
        super().tell(error)
        if size() > 1:
            dist.barrier()


def _benign(kind: type[PlainCheckpoint], words: str, does: str) -> Impostor:
    return Impostor(f"benign.{words}", does, "", "", (), functions=lambda: offer(kind))


IMPOSTORS = (
    _benign(PlainCheckpoint, "checkpoint-file", "One file per step, renamed when it is whole."),
    _benign(FolderPerStep, "checkpoint-folder", "A folder of files per save and a pointer."),
    _benign(Marked, "checkpoint-marked", "Written in place by a thread, an empty marker at last."),
    _benign(ZeroForNone, "checkpoint-zero", "Returns 0 where there is nothing."),
)
