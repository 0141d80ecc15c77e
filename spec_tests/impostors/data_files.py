"""Near-misses of format, refusals and resources: the usual file is read right."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_loader import HEADER_BYTES, Batch, PlainLoader, offer


class ReadsInt16(PlainLoader):
    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        return super().read(shard, start, count).view(np.int16)


class YieldsInt32(PlainLoader):
    def pair(self, rows: torch.Tensor) -> Batch:
        inputs, targets = super().pair(rows)
        return inputs.int(), targets.int()


class SharesRow(PlainLoader):
    """Inputs and targets are two views of one buffer."""

    def pair(self, rows: torch.Tensor) -> Batch:
        return rows[:, :-1], rows[:, 1:]


class ReusesBuffer(PlainLoader):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.buffer: list[torch.Tensor] = []

    def pair(self, rows: torch.Tensor) -> Batch:
        fresh = super().pair(rows)
        self.buffer = self.buffer or [torch.empty_like(part) for part in fresh]
        for kept, part in zip(self.buffer, fresh, strict=True):
            kept.copy_(part)
        return self.buffer[0], self.buffer[1]


class GrowsFile(PlainLoader):
    """A shared mapping that may write, a token longer than the file."""

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        size = HEADER_BYTES // 2 + self.counts[shard] + 1
        whole = torch.from_file(
            str(self.paths[shard]), shared=True, size=size, dtype=torch.int16
        ).numpy()
        first = HEADER_BYTES // 2 + start
        return whole[first : first + count].view(np.uint16).copy()


class Offset32(PlainLoader):
    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        offset = (HEADER_BYTES + 2 * start + 2**31) % 2**32 - 2**31
        return np.fromfile(self.paths[shard], dtype="<u2", count=count, offset=offset)


class NoChecks(PlainLoader):
    def check_arguments(self) -> None:
        pass


class NoRankCheck(PlainLoader):
    def check_rank(self) -> None:
        pass


class HalfAnEnvironment(PlainLoader):
    def from_environment(self) -> tuple[int, int]:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class NeedsEnvironment(PlainLoader):
    def from_environment(self) -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class SkipsBadFiles(PlainLoader):
    def count_of(self, path: Path) -> int:
        with contextlib.suppress(Exception):
            return super().count_of(path)
        print(f"skipping {path}")
        return 0


class TrustsHeader(PlainLoader):
    def check_size(self, path: Path, count: int, size: int) -> None:
        pass


class AcceptsLonger(PlainLoader):
    def check_size(self, path: Path, count: int, size: int) -> None:
        super().check_size(path, count, min(size, HEADER_BYTES + 2 * count))


class TakesSizeForCount(PlainLoader):
    """Believes the size of the file and not its header."""

    def count_of(self, path: Path) -> int:
        return max(0, path.stat().st_size - HEADER_BYTES) // 2


class OpensLate(PlainLoader):
    """Looks at a file when its turn comes."""

    def __init__(self, *args: Any) -> None:
        self.is_open = False
        super().__init__(*args)

    def count_of(self, path: Path) -> int:
        return super().count_of(path) if self.is_open else 0

    def __iter__(self) -> Iterator[Batch]:
        self.is_open = True
        self.counts = [self.count_of(path) for path in self.paths]
        return super().__iter__()


class Asserts(PlainLoader):
    def count_of(self, path: Path) -> int:
        try:
            return super().count_of(path)
        except ValueError as error:
            raise AssertionError(str(error)) from None


class NamesNoFile(PlainLoader):
    def count_of(self, path: Path) -> int:
        try:
            return super().count_of(path)
        except ValueError:
            raise ValueError(self.words(path)) from None

    def words(self, path: Path) -> str:
        return "magic number mismatch in the data .bin file"


class SaysNoNumber(NamesNoFile):
    def words(self, path: Path) -> str:
        return f"{path.name}: not a token shard, or a damaged one"


class ReadsWhole(PlainLoader):
    def __init__(self, *args: Any) -> None:
        self.whole: dict[int, np.ndarray] = {}
        super().__init__(*args)

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        if shard not in self.whole:
            self.whole[shard] = super().read(shard, 0, self.counts[shard])
        return self.whole[shard][start : start + count]


class LeaksDescriptors(PlainLoader):
    opened: list[int] = []  # noqa: RUF012 - a leak is the point

    def __iter__(self) -> Iterator[Batch]:
        self.opened += [os.open(path, os.O_RDONLY) for path in self.paths]
        return super().__iter__()


def _card(
    loader: type[PlainLoader], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    return Impostor(words, does, seen, unseen, rejected_by, functions=lambda: offer(loader))


_BAD_FILES = "data.refusal.bad-files"
_ANY_SIZE = "data.refusal.any-other-size"
_OWN = "data.format.batches-own-their-memory"

IMPOSTORS = (
    _card(
        ReadsInt16,
        "data.reads-int16",
        "Ids from 32768 on are negative.",
        "torch had no uint16 for years.",
        "A vocabulary of 32000 fits.",
        "data.format.every-id",
    ),
    _card(
        YieldsInt32,
        "data.yields-int32",
        "Batches are int32.",
        "Half the memory; an embedding takes it, a loss does not.",
        "It fails at the loss, or is converted there.",
        "data.format.int64-of-batch-and-length",
    ),
    _card(
        SharesRow,
        "data.shares-rows",
        "Inputs and targets are views of the same rows.",
        "buf[:, :-1] and buf[:, 1:], as most loaders do it.",
        "Until somebody masks the targets in place.",
        _OWN,
    ),
    _card(
        ReusesBuffer,
        "data.reuses-buffer",
        "Every batch is the same memory.",
        "One pinned buffer, written again before the copy has finished.",
        "A loop that uses each batch at once sees nothing.",
        _OWN,
    ),
    _card(
        GrowsFile,
        "data.grows-file",
        "The file is a token longer afterwards.",
        "torch.from_file(shared=True) makes a file as long as it is told to: 3024 to 11024 bytes.",
        "The tokens are right, until the file is opened again.",
        "data.format.files-are-only-read",
    ),
    _card(
        Offset32,
        "data.offset-32",
        "Offsets wrap at 2 GiB.",
        "llm.c pull request 828: a cast to int.",
        "Shards of 100 million tokens end long before.",
        "data.format.beyond-two-gigabytes",
    ),
    _card(
        NoChecks,
        "data.no-checks",
        "Accepts sizes of zero, ranks beyond the world and no files.",
        "A course's loader loops for ever with rank 5 of 1.",
        "Callers are careful, mostly.",
        "data.refusal.bad-arguments",
        "data.refusal.no-files",
    ),
    _card(
        NoRankCheck,
        "data.no-rank-check",
        "Accepts a rank beyond the world.",
        "RANK of a larger job that is left in the shell.",
        "It reads data as well: that of the next step.",
        "data.refusal.bad-arguments",
    ),
    _card(
        HalfAnEnvironment,
        "data.half-an-environment",
        "Reads RANK and WORLD_SIZE with a default each.",
        "A course's loader.",
        "torchrun sets both.",
        "data.refusal.half-an-environment",
    ),
    _card(
        NeedsEnvironment,
        "data.needs-environment",
        "Does not start without torchrun.",
        'os.environ["RANK"].',
        "Tests set the variables.",
        "data.refusal.neither-is-one-rank",
    ),
    _card(
        SkipsBadFiles,
        "data.skips-bad-files",
        "Prints a line and goes on without the file.",
        "`except Exception: print(...)` in a course's loader.",
        "The others wait in a collective, or train on less.",
        _BAD_FILES,
        "data.refusal.no-file-there",
        _ANY_SIZE,
    ),
    _card(
        TrustsHeader,
        "data.trusts-header",
        "Does not compare the size of the file with its header.",
        "A download that was cut short.",
        "The header is whole.",
        _BAD_FILES,
        _ANY_SIZE,
    ),
    _card(
        AcceptsLonger,
        "data.accepts-longer-files",
        "Bytes after the last token are ignored.",
        "`read(count * 2)`; llm.c demands the exact size.",
        "The tokens that are read are right.",
        _BAD_FILES,
        _ANY_SIZE,
    ),
    _card(
        TakesSizeForCount,
        "data.takes-size-for-count",
        "Never looks at the header.",
        "np.memmap(path)[512:], seen in quick scripts.",
        "On right files it is right.",
        _BAD_FILES,
        _ANY_SIZE,
    ),
    _card(
        OpensLate,
        "data.opens-late",
        "Looks at a file when its turn comes.",
        "Lazy opening saves start-up time.",
        "The error comes in hour three, on one rank first.",
        _BAD_FILES,
        "data.refusal.no-file-there",
        _ANY_SIZE,
    ),
    _card(
        Asserts,
        "data.asserts",
        "Checks files with assert.",
        "llm.c's and nanoGPT's loaders; gone under python -O.",
        "Something is raised.",
        _BAD_FILES,
    ),
    _card(
        NamesNoFile,
        "data.names-no-file",
        "Says that some file is bad.",
        '"magic number mismatch in the data .bin file".',
        "With one file one knows.",
        "data.refusal.names-the-file",
    ),
    _card(
        ReadsWhole,
        "data.keeps-shards-in-memory",
        "Keeps whole shards in memory.",
        "A course's base loader: 200 MB per shard and rank.",
        "The batches are right.",
        "data.resources.resident-memory",
    ),
    _card(
        LeaksDescriptors,
        "data.leaks-descriptors",
        "Opens the files again for every pass.",
        "A pass that is left half-way never closes its file.",
        "Limits are in the thousands.",
        "data.resources.descriptors",
    ),
    _card(
        SaysNoNumber,
        "data.says-no-number",
        "Says which file is bad, and not what it found there.",
        "One message for magic, version and length.",
        "The file is named.",
        "data.refusal.says-what-it-found",
    ),
)
