"""Near-misses of the partition: the tokens are right, and somebody else's."""

import numpy as np
import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.loader import HEADER_BYTES, PlainLoader

LOADER = Source("spec_tests.plain.loader")

LOADER.near_miss(
    "data.rolls-targets",
    "data.partition.shifted-by-one",
    "- return rows[:, :-1].clone(), rows[:, 1:].clone()",
    "+ return rows[:, :-1].clone(), rows[:, :-1].roll(-1, dims=1)",
    does="The last column's target is the row's first token.",
    seen="`y = x.roll(-1)`, in many a notebook.",
    unseen="With a long context it is one target in a thousand.",
)

LOADER.near_miss(
    "data.one-stream",
    ("data.partition.sequences-stay-in-a-shard", "data.partition.global-order"),
    "- return sum(self.sequences_in(count) for count in self.counts)",
    "+ return (sum(self.counts) - 1) // self.length",
    "...",
    "+ shards = [np.fromfile(path, '<u2', offset=HEADER_BYTES) for path in self.paths]",
    "+ first = number * self.length",
    "+ return np.concatenate(shards)[first : first + self.length + 1]",
    "  for path, count in zip(self.paths, self.counts, strict=True):",
    does="A sequence runs from the end of one shard into the next.",
    seen="A course's base loader concatenates the rest of a shard with the next one.",
    unseen="One sequence per shard.",
)

LOADER.near_miss(
    "data.same-on-all-ranks",
    ("data.partition.ranks-differ", "data.partition.global-order"),
    "- first = (index * self.size + self.rank) * self.batch_size",
    "+ first = index * self.size * self.batch_size",
    does="Every rank reads the data of rank 0.",
    seen="RANK that is read before torchrun's environment arrives.",
    unseen="The loss falls as it does on one rank.",
)

LOADER.near_miss(
    "data.strided",
    ("data.partition.any-world-size", "data.partition.global-order"),
    "- first = (index * self.size + self.rank) * self.batch_size",
    "- numbers = range(first, first + self.batch_size)",
    "+ first = index * self.size * self.batch_size + self.rank",
    "+ numbers = range(first, first + self.batch_size * self.size, self.size)",
    does="Deals the sequences of a step out one by one.",
    seen="torch's DistributedSampler.",
    unseen="The global batch is the same set: only its order depends on W.",
)


@near_miss(
    "data.advances-alone",
    rejected_by=("data.partition.ranks-change-shard-together", "data.partition.global-order"),
)
class AdvancesAlone(PlainLoader):
    """Each rank tests for the end of the shard at its own position.

    From: build-nanogpt DataLoaderLite and llm.c train_gpt2.py; four pull requests argue about it.
    Unseen: Shards of 100 million tokens end rarely.
    """

    def walk(self, begin):
        step = self.batch_size * self.length
        for path, count in zip(self.paths, self.counts, strict=True):
            tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES).astype(np.int64)
            position = self.rank * step
            while position + step + 1 <= count:
                rows = torch.from_numpy(tokens[position : position + step + 1])
                shape = (self.batch_size, self.length)
                yield rows[:-1].view(shape).clone(), rows[1:].view(shape).clone()
                position += step * self.size


LOADER.near_miss(
    "data.uneven-tail",
    "data.partition.equally-many-batches",
    "- return self.num_sequences() // (self.batch_size * self.size)",
    "+ return (self.num_sequences() // self.batch_size + self.size - 1 - self.rank) // self.size",
    does="The first ranks get one batch more.",
    seen="datasets' split_dataset_by_node: 17 rows on 3 ranks give 6, 6, 5.",
    unseen="It covers the data, and hangs at the end of the epoch.",
)

LOADER.near_miss(
    "data.stops-at-short-shard",
    "data.partition.short-shards",
    "- self.counts = [tokens_in(path) for path in self.paths]",
    "+ counts = [tokens_in(path) for path in self.paths]",
    "+ self.counts = counts[: [*map(self.sequences_in, counts), 0].index(0)]",
    does="A shard without a sequence ends the pass.",
    seen="`if not batch: return` in the loop over the shards.",
    unseen="Only the last shard of a corpus is short.",
)

LOADER.near_miss(
    "data.sorts-files",
    "data.partition.callers-order",
    "- self.paths = [Path(path) for path in paths]",
    "+ self.paths = sorted(Path(path) for path in paths)",
    does="Sorts the paths as strings.",
    seen="sorted(glob(...)) inside the loader.",
    unseen="With zero-padded names given in order nothing changes.",
)

LOADER.near_miss(
    "data.never-ends",
    "data.partition.one-pass-per-iter",
    "      yield batch",
    "+ yield from self.walk(0)",
    does="Begins again by itself.",
    seen="Loaders for a fixed number of steps: build-nanogpt, modded-nanogpt.",
    unseen="The training loop counts steps, not batches.",
)

LOADER.near_miss(
    "data.ignores-environment",
    "data.partition.rank-from-environment",
    '- found = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]',
    "+ found = [None, None]",
    does="Takes rank 0 of 1 where no rank is given.",
    seen="A default argument of `rank=0, world_size=1`.",
    unseen="Every rank reads everything and the loss falls.",
)

LOADER.near_miss(
    "data.environment-wins",
    "data.partition.arguments-win",
    '+ if "RANK" in os.environ:',
    "+     rank = size = None",
    "  if rank is not None and size is not None:",
    does="Takes RANK and WORLD_SIZE even where a rank is given.",
    seen="`int(os.environ.get('RANK', rank))`.",
    unseen="Evaluation on one rank reads a part of the data and says nothing.",
)

LOADER.near_miss(
    "data.backwards",
    ("data.partition.sequences-in-order", "data.partition.global-order"),
    "+ number = self.num_sequences() - 1 - number",
    "  for path, count in zip(self.paths, self.counts, strict=True):",
    does="Reads from the last sequence to the first.",
    seen="An index that is popped from the end of a list.",
    unseen="Every token is read exactly once.",
)
