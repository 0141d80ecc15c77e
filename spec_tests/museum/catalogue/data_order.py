"""Near-misses of the partition: the tokens are right, and somebody else's."""

import itertools
import os

import numpy as np
import torch

from spec_tests.museum.card import near_miss
from spec_tests.plain.loader import PlainLoader


@near_miss("data.rolls-targets", rejected_by="data.partition.shifted-by-one")
class Rolls(PlainLoader):
    """The last column's target is the row's first token.

    From: `y = x.roll(-1)`, in many a notebook.
    Unseen: With a long context it is one target in a thousand.
    """

    def pair(self, rows):
        inputs = rows[:, :-1].clone()
        return inputs, inputs.roll(-1, dims=1)


@near_miss("data.no-shift", rejected_by="data.partition.shifted-by-one")
class NoShift(PlainLoader):
    """The targets are the inputs.

    From: A model that shifts by itself, swapped for one that does not.
    Unseen: The loss falls, to zero even.
    """

    def pair(self, rows):
        return rows[:, :-1].clone(), rows[:, :-1].clone()


@near_miss(
    "data.one-stream",
    rejected_by=("data.partition.sequences-stay-in-a-shard", "data.partition.global-order"),
)
class OneStream(PlainLoader):
    """A sequence runs from the end of one shard into the next.

    From: A course's base loader concatenates what is left of a shard with the next one.
    Unseen: One sequence per shard.

    Shards are glued together before they are cut.
    """

    def num_sequences(self):
        return (sum(self.counts) - 1) // self.length

    def row(self, number):
        whole = [self.read(shard, 0, count) for shard, count in enumerate(self.counts)]
        start = number * self.length
        return np.concatenate(whole)[start : start + self.length + 1]


@near_miss(
    "data.same-on-all-ranks",
    rejected_by=(
        "data.partition.ranks-differ",
        "data.partition.global-order",
    ),
)
class SameEverywhere(PlainLoader):
    """Every rank reads the data of rank 0.

    From: RANK that is read before torchrun's environment arrives.
    Unseen: The loss falls as it does on one rank.
    """

    def numbers(self, batch):
        first = batch * self.size * self.batch_size
        return list(range(first, first + self.batch_size))


@near_miss(
    "data.strided", rejected_by=("data.partition.any-world-size", "data.partition.global-order")
)
class Strided(PlainLoader):
    """Deals the sequences of a step out one by one.

    From: torch's DistributedSampler.
    Unseen: The global batch is the same set: only its order depends on W.
    """

    def numbers(self, batch):
        first = batch * self.size * self.batch_size
        return [first + row * self.size + self.rank for row in range(self.batch_size)]


@near_miss(
    "data.overlapping-offsets",
    rejected_by=("data.partition.ranks-differ", "data.partition.global-order"),
)
class Overlaps(PlainLoader):
    """Neighbouring ranks share a sequence.

    From: rank * (batch_size - 1), where the T + 1 of a buffer was confused with B.
    Unseen: Nobody counts.
    """

    def numbers(self, batch):
        first = batch * self.size * self.batch_size + self.rank * (self.batch_size - 1)
        return list(range(first, first + self.batch_size))


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
        for shard, count in enumerate(self.counts):
            position = self.rank * step
            while position + step + 1 <= count:
                rows = self.read(shard, position, step + 1).astype(np.int64)
                shape = (self.batch_size, self.length)
                pieces = (rows[:-1].reshape(shape), rows[1:].reshape(shape))
                yield torch.from_numpy(pieces[0].copy()), torch.from_numpy(pieces[1].copy())
                position += step * self.size


@near_miss("data.uneven-tail", rejected_by="data.partition.equally-many-batches")
class UnevenTail(PlainLoader):
    """The first ranks get one batch more.

    From: datasets' split_dataset_by_node: 17 rows on 3 ranks give 6, 6, 5.
    Unseen: It covers the data, and hangs at the end of the epoch.
    """

    def walk(self, begin):
        yield from super().walk(begin)
        rest = self.num_sequences() - self.num_batches() * self.batch_size * self.size
        if rest >= (self.rank + 1) * self.batch_size:
            yield self.batch(self.num_batches())


@near_miss(
    "data.repeats-the-first",
    rejected_by=("data.partition.equally-many-batches", "data.partition.ranks-differ"),
)
class RepeatsTheFirst(PlainLoader):
    """Fills the last batch with the first sequences.

    From: torch's DistributedSampler without drop_last.
    Unseen: All ranks have equally many batches.
    """

    def num_batches(self):
        return -(-self.num_sequences() // (self.batch_size * self.size))

    def find(self, number):
        return super().find(number % self.num_sequences())


@near_miss("data.stops-at-short-shard", rejected_by="data.partition.short-shards")
class StopsAtShortShard(PlainLoader):
    """A shard without a sequence ends the pass.

    From: `if not batch: return` in the loop over the shards.
    Unseen: Only the last shard of a corpus is short.
    """

    def files(self, paths):
        found = super().files(paths)
        self.length = max(1, self.length)
        return list(
            itertools.takewhile(lambda path: self.sequences_in(self.count_of(path)) > 0, found)
        )

    def check_files(self):
        pass


@near_miss("data.sorts-files", rejected_by="data.partition.callers-order")
class SortsFiles(PlainLoader):
    """Sorts the paths as strings.

    From: sorted(glob(...)) inside the loader.
    Unseen: With zero-padded names given in order nothing changes.
    """

    def files(self, paths):
        return sorted(super().files(paths))


@near_miss(
    "data.never-ends",
    rejected_by="data.partition.one-pass-per-iter",
)
class NeverEnds(PlainLoader):
    """Begins again by itself.

    From: Loaders for a fixed number of steps: build-nanogpt, modded-nanogpt.
    Unseen: The training loop counts steps, not batches.
    """

    def walk(self, begin):
        for index in itertools.count(begin):
            yield self.batch(index % self.num_batches())


@near_miss("data.ignores-environment", rejected_by="data.partition.rank-from-environment")
class IgnoresEnvironment(PlainLoader):
    """Takes rank 0 of 1 where no rank is given.

    From: A default argument of `rank=0, world_size=1`.
    Unseen: Every rank reads everything and the loss falls.
    """

    def from_environment(self):
        return 0, 1


@near_miss("data.environment-wins", rejected_by="data.partition.arguments-win")
class EnvironmentWins(PlainLoader):
    """Takes RANK and WORLD_SIZE even where a rank is given.

    From: `int(os.environ.get('RANK', rank))`.
    Unseen: Evaluation on one rank reads a part of the data and says nothing.
    """

    def who(self, rank, size):
        return self.from_environment() if "RANK" in os.environ else super().who(rank, size)


@near_miss(
    "data.backwards",
    rejected_by=("data.partition.sequences-in-order", "data.partition.global-order"),
)
class Backwards(PlainLoader):
    """Reads from the last sequence to the first.

    From: An index that is popped from the end of a list.
    Unseen: Every token is read exactly once.
    """

    def find(self, number):
        return super().find(self.num_sequences() - 1 - number)
