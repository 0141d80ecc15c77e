"""Near-misses of format, refusals and resources: the usual file is read right."""

from __future__ import annotations

from spec_tests.museum.card import Source

LOADER = Source("spec_tests.plain.loader")

LOADER.near_miss(
    "data.reads-int16",
    "data.format.every-id",
    '- return np.fromfile(path, dtype="<u2", count=self.length + 1, offset=offset)',
    '+ return np.fromfile(path, dtype="<i2", count=self.length + 1, offset=offset)',
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
    '- return np.fromfile(path, dtype="<u2", count=self.length + 1, offset=offset)',
    "+ size = HEADER_BYTES // 2 + count + 1",
    "+ whole = torch.from_file(str(path), True, size, dtype=torch.int16).numpy()",
    "+ return whole[offset // 2 : offset // 2 + self.length + 1].view(np.uint16).copy()",
    does="The file is a token longer afterwards.",
    seen="torch.from_file(shared=True) makes a file as long as it is told to: 3024 to 11024 bytes.",
    unseen="The tokens are right, until the file is opened again.",
)

LOADER.near_miss(
    "data.offset-32",
    "data.format.beyond-two-gigabytes",
    "- offset = HEADER_BYTES + 2 * number * self.length",
    "+ offset = (HEADER_BYTES + 2 * number * self.length + 2**31) % 2**32 - 2**31",
    does="Offsets wrap at 2 GiB.",
    seen="llm.c pull request 828: a cast to int.",
    unseen="Shards of 100 million tokens end long before.",
)

NO_CHECKS = (
    "- if batch_size < 1 or length < 1:",
    '-     raise ValueError(f"expected sizes > 0, got {batch_size} and {length}")',
    "- if not 0 <= self.rank < self.size:",
    '-     raise ValueError(f"expected a rank below {self.size}, got {self.rank}")',
    "- if not self.paths:",
    '-     raise ValueError("expected at least one file")',
)

LOADER.near_miss(
    "data.no-checks",
    ("data.refusal.bad-arguments", "data.refusal.no-files"),
    *NO_CHECKS,
    does="Accepts sizes of zero, ranks beyond the world and no files.",
    seen="A course's loader loops for ever with rank 5 of 1.",
    unseen="Callers are careful, mostly.",
)

LOADER.near_miss(
    "data.no-rank-check",
    "data.refusal.bad-arguments",
    "- if not 0 <= self.rank < self.size:",
    '-     raise ValueError(f"expected a rank below {self.size}, got {self.rank}")',
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


LOADER.near_miss(
    "data.skips-bad-files",
    (
        "data.refusal.bad-files",
        "data.refusal.no-file-there",
        "data.refusal.any-other-size",
    ),
    "- self.counts = [tokens_in(path) for path in self.paths]",
    "+ self.counts = [0] * len(self.paths)",
    "+ for shard, path in enumerate(self.paths):",
    "+     try:",
    "+         self.counts[shard] = tokens_in(path)",
    "+     except Exception:",
    '+         print(f"skipping {path}")',
    does="Prints a line and goes on without the file.",
    seen="`except Exception: print(...)` in a course's loader.",
    unseen="The others wait in a collective, or train on less.",
)

LOADER.near_miss(
    "data.trusts-header",
    ("data.refusal.bad-files", "data.refusal.any-other-size"),
    "- if size != HEADER_BYTES + 2 * count:",
    "+ if False:",
    does="Does not compare the size of the file with its header.",
    seen="A download that was cut short.",
    unseen="The header is whole.",
)


LOADER.near_miss(
    "data.names-no-file",
    "data.refusal.names-the-file",
    "- self.counts = [tokens_in(path) for path in self.paths]",
    "+ try:",
    "+     self.counts = [tokens_in(path) for path in self.paths]",
    "+ except ValueError:",
    '+     raise ValueError("magic number mismatch in the data .bin file") from None',
    does="Says that some file is bad.",
    seen='"magic number mismatch in the data .bin file".',
    unseen="With one file one knows.",
)

LOADER.near_miss(
    "data.says-no-number",
    "data.refusal.says-what-it-found",
    "- self.counts = [tokens_in(path) for path in self.paths]",
    "+ self.counts = []",
    "+ for path in self.paths:",
    "+     try:",
    "+         self.counts.append(tokens_in(path))",
    "+     except ValueError:",
    '+         what = "not a token shard, or a damaged one"',
    '+         raise ValueError(f"{path.name}: {what}") from None',
    does="Names the bad file, and not the value that it found there.",
    seen="One message for magic, version and length.",
    unseen="The file is named.",
)

KEEPS_SHARDS = (
    "  self.counts = [tokens_in(path) for path in self.paths]",
    "+ self.whole = {}",
    "...",
    '- return np.fromfile(path, dtype="<u2", count=self.length + 1, offset=offset)',
    "+ if path not in self.whole:",
    '+     self.whole[path] = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES)',
    "+ first = number * self.length",
    "+ return self.whole[path][first : first + self.length + 1]",
)

LOADER.near_miss(
    "data.keeps-shards-in-memory",
    "data.resources.resident-memory",
    *KEEPS_SHARDS,
    does="Keeps whole shards in memory.",
    seen="A course's base loader: 200 MB per shard and rank.",
    unseen="The batches are right.",
)

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
