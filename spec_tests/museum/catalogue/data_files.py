"""Near-misses of format, refusals and resources: the usual file is read right."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.loader import HEADER_BYTES, PlainLoader


@near_miss("data.reads-int16", rejected_by="data.format.every-id")
class ReadsInt16(PlainLoader):
    """Ids from 32768 on are negative.

    From: torch had no uint16 for years.
    Unseen: A vocabulary of 32000 fits.
    """

    def read(self, shard, start, count):
        return super().read(shard, start, count).view(np.int16)


@near_miss("data.yields-int32", rejected_by="data.format.int64-of-batch-and-length")
class YieldsInt32(PlainLoader):
    """Batches are int32.

    From: Half the memory; an embedding takes it, a loss does not.
    Unseen: It fails at the loss, or is converted there.
    """

    def pair(self, rows):
        inputs, targets = super().pair(rows)
        return inputs.int(), targets.int()


@near_miss("data.shares-rows", rejected_by="data.format.batches-own-their-memory")
class SharesRow(PlainLoader):
    """Inputs and targets are views of the same rows.

    From: buf[:, :-1] and buf[:, 1:], as most loaders do it.
    Unseen: Until somebody masks the targets in place.
    """

    def pair(self, rows):
        return rows[:, :-1], rows[:, 1:]


@near_miss("data.grows-file", rejected_by="data.format.files-are-only-read")
class GrowsFile(PlainLoader):
    """The file is a token longer afterwards.

    From: torch.from_file(shared=True) makes a file as long as it is told to: 3024 to 11024 bytes.
    Unseen: The tokens are right, until the file is opened again.
    """

    def read(self, shard, start, count):
        size = HEADER_BYTES // 2 + self.counts[shard] + 1
        whole = torch.from_file(
            str(self.paths[shard]), shared=True, size=size, dtype=torch.int16
        ).numpy()
        first = HEADER_BYTES // 2 + start
        return whole[first : first + count].view(np.uint16).copy()


@near_miss("data.offset-32", rejected_by="data.format.beyond-two-gigabytes")
class Offset32(PlainLoader):
    """Offsets wrap at 2 GiB.

    From: llm.c pull request 828: a cast to int.
    Unseen: Shards of 100 million tokens end long before.
    """

    def read(self, shard, start, count):
        offset = (HEADER_BYTES + 2 * start + 2**31) % 2**32 - 2**31
        return np.fromfile(self.paths[shard], dtype="<u2", count=count, offset=offset)


@near_miss("data.no-checks", rejected_by=("data.refusal.bad-arguments", "data.refusal.no-files"))
class NoChecks(PlainLoader):
    """Accepts sizes of zero, ranks beyond the world and no files.

    From: A course's loader loops for ever with rank 5 of 1.
    Unseen: Callers are careful, mostly.
    """

    def check_arguments(self):
        pass


@near_miss("data.no-rank-check", rejected_by="data.refusal.bad-arguments")
class NoRankCheck(PlainLoader):
    """Accepts a rank beyond the world.

    From: RANK of a larger job that is left in the shell.
    Unseen: It reads data as well: that of the next step.
    """

    def check_rank(self):
        pass


@near_miss("data.half-an-environment", rejected_by="data.refusal.half-an-environment")
class HalfAnEnvironment(PlainLoader):
    """Reads RANK and WORLD_SIZE with a default each.

    From: A course's loader.
    Unseen: torchrun sets both.
    """

    def from_environment(self):
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@near_miss("data.needs-environment", rejected_by="data.refusal.neither-is-one-rank")
class NeedsEnvironment(PlainLoader):
    """Does not start without torchrun.

    From: os.environ["RANK"].
    Unseen: Tests set the variables.
    """

    def from_environment(self):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@near_miss(
    "data.skips-bad-files",
    rejected_by=(
        "data.refusal.bad-files",
        "data.refusal.no-file-there",
        "data.refusal.any-other-size",
    ),
)
class SkipsBadFiles(PlainLoader):
    """Prints a line and goes on without the file.

    From: `except Exception: print(...)` in a course's loader.
    Unseen: The others wait in a collective, or train on less.
    """

    def count_of(self, path):
        with contextlib.suppress(Exception):
            return super().count_of(path)
        print(f"skipping {path}")
        return 0


@near_miss(
    "data.trusts-header", rejected_by=("data.refusal.bad-files", "data.refusal.any-other-size")
)
class TrustsHeader(PlainLoader):
    """Does not compare the size of the file with its header.

    From: A download that was cut short.
    Unseen: The header is whole.
    """

    def check_size(self, path, count, size):
        pass


@near_miss("data.names-no-file", rejected_by="data.refusal.names-the-file")
class NamesNoFile(PlainLoader):
    """Says that some file is bad.

    From: "magic number mismatch in the data .bin file".
    Unseen: With one file one knows.
    """

    def count_of(self, path):
        try:
            return super().count_of(path)
        except ValueError:
            raise ValueError(self.words(path)) from None

    def words(self, path):
        return "magic number mismatch in the data .bin file"


@near_miss("data.says-no-number", rejected_by="data.refusal.says-what-it-found")
class SaysNoNumber(NamesNoFile):
    """Says which file is bad, and not what it found there.

    From: One message for magic, version and length.
    Unseen: The file is named.
    """

    def words(self, path):
        return f"{path.name}: not a token shard, or a damaged one"


@near_miss("data.keeps-shards-in-memory", rejected_by="data.resources.resident-memory")
class ReadsWhole(PlainLoader):
    """Keeps whole shards in memory.

    From: A course's base loader: 200 MB per shard and rank.
    Unseen: The batches are right.
    """

    def __init__(self, *args):
        self.whole: dict[int, np.ndarray] = {}
        super().__init__(*args)

    def read(self, shard, start, count):
        if shard not in self.whole:
            self.whole[shard] = super().read(shard, 0, self.counts[shard])
        return self.whole[shard][start : start + count]


@near_miss("data.leaks-descriptors", rejected_by="data.resources.descriptors")
class LeaksDescriptors(PlainLoader):
    """Opens the files again for every pass.

    From: A pass that is left half-way never closes its file.
    Unseen: Limits are in the thousands.
    """

    opened: list[int] = []  # noqa: RUF012 - a leak is the point

    def __iter__(self):
        self.opened += [os.open(path, os.O_RDONLY) for path in self.paths]
        return super().__iter__()
