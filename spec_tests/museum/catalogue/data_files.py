"""Near-misses of format, refusals and resources: the usual file is read right."""

from __future__ import annotations

import contextlib

import numpy as np

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.loader import PlainLoader

LOADER = Source("spec_tests.plain.loader")

LOADER.near_miss(
    "data.reads-int16",
    "data.format.every-id",
    '- return np.fromfile(self.paths[shard], dtype="<u2", count=count, offset=offset)',
    '+ return np.fromfile(self.paths[shard], dtype="<i2", count=count, offset=offset)',
    does="Ids from 32768 on are negative.",
    seen="torch had no uint16 for years.",
    unseen="A vocabulary of 32000 fits.",
)

LOADER.near_miss(
    "data.yields-int32",
    "data.format.int64-of-batch-and-length",
    "- return rows[:, :-1].clone(), rows[:, 1:].clone()",
    "+ return rows[:, :-1].int(), rows[:, 1:].int()",
    does="Batches are int32.",
    seen="Half the memory; an embedding takes it, a loss does not.",
    unseen="It fails at the loss, or is converted there.",
)

LOADER.near_miss(
    "data.shares-rows",
    "data.format.batches-own-their-memory",
    "- return rows[:, :-1].clone(), rows[:, 1:].clone()",
    "+ return rows[:, :-1], rows[:, 1:]",
    does="Inputs and targets are views of the same rows.",
    seen="buf[:, :-1] and buf[:, 1:], as most loaders do it.",
    unseen="Until somebody masks the targets in place.",
)

LOADER.near_miss(
    "data.grows-file",
    "data.format.files-are-only-read",
    '- return np.fromfile(self.paths[shard], dtype="<u2", count=count, offset=offset)',
    "+ size = HEADER_BYTES // 2 + self.counts[shard] + 1",
    "+ whole = torch.from_file(str(self.paths[shard]), True, size, dtype=torch.int16).numpy()",
    "+ first = HEADER_BYTES // 2 + start",
    "+ return whole[first : first + count].view(np.uint16).copy()",
    does="The file is a token longer afterwards.",
    seen="torch.from_file(shared=True) makes a file as long as it is told to: 3024 to 11024 bytes.",
    unseen="The tokens are right, until the file is opened again.",
)

LOADER.near_miss(
    "data.offset-32",
    "data.format.beyond-two-gigabytes",
    "- offset = HEADER_BYTES + 2 * start",
    "+ offset = (HEADER_BYTES + 2 * start + 2**31) % 2**32 - 2**31",
    does="Offsets wrap at 2 GiB.",
    seen="llm.c pull request 828: a cast to int.",
    unseen="Shards of 100 million tokens end long before.",
)

LOADER.near_miss(
    "data.no-checks",
    ("data.refusal.bad-arguments", "data.refusal.no-files"),
    "- self.check_arguments()",
    "+ pass",
    does="Accepts sizes of zero, ranks beyond the world and no files.",
    seen="A course's loader loops for ever with rank 5 of 1.",
    unseen="Callers are careful, mostly.",
)

LOADER.near_miss(
    "data.no-rank-check",
    "data.refusal.bad-arguments",
    "- self.check_rank()",
    "+ pass",
    does="Accepts a rank beyond the world.",
    seen="RANK of a larger job that is left in the shell.",
    unseen="It reads data as well: that of the next step.",
)

LOADER.near_miss(
    "data.half-an-environment",
    "data.refusal.half-an-environment",
    '- found = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]',
    '+ found = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]',
    does="Reads RANK and WORLD_SIZE with a default each.",
    seen="A course's loader.",
    unseen="torchrun sets both.",
)

LOADER.near_miss(
    "data.needs-environment",
    "data.refusal.neither-is-one-rank",
    '- found = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]',
    '+ found = [os.environ["RANK"], os.environ["WORLD_SIZE"]]',
    does="Does not start without torchrun.",
    seen='os.environ["RANK"].',
    unseen="Tests set the variables.",
)


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


LOADER.near_miss(
    "data.trusts-header",
    ("data.refusal.bad-files", "data.refusal.any-other-size"),
    "- if size != HEADER_BYTES + 2 * count:",
    "+ if False:",
    does="Does not compare the size of the file with its header.",
    seen="A download that was cut short.",
    unseen="The header is whole.",
)


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
    """Names the bad file, and not the value that it found there.

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


LOADER.near_miss(
    "data.leaks-descriptors",
    "data.resources.descriptors",
    "  begin, self.begin = self.begin, 0",
    "+ for path in self.paths:",
    "+     os.open(path, os.O_RDONLY)",
    does="Opens the files again for every pass.",
    seen="A pass that is left half-way never closes its file.",
    unseen="Limits are in the thousands.",
)
