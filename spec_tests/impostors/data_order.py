"""Near-misses of the partition: the tokens are right, and somebody else's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_loader import Batch, PlainLoader, offer


class Rolls(PlainLoader):
    def pair(self, rows: torch.Tensor) -> Batch:
        inputs = rows[:, :-1].clone()
        return inputs, inputs.roll(-1, dims=1)


class NoShift(PlainLoader):
    def pair(self, rows: torch.Tensor) -> Batch:
        return rows[:, :-1].clone(), rows[:, :-1].clone()


class Interleaves(PlainLoader):
    def numbers(self, batch: int) -> list[int]:
        share = self.num_batches()
        first = self.rank * self.batch_size
        return [(first + row) * share + batch for row in range(self.batch_size)]


class OneStream(PlainLoader):
    """Shards are glued together before they are cut."""

    def num_sequences(self) -> int:
        return (sum(self.counts) - 1) // self.length

    def row(self, number: int) -> np.ndarray:
        whole = [self.read(shard, 0, count) for shard, count in enumerate(self.counts)]
        start = number * self.length
        return np.concatenate(whole)[start : start + self.length + 1]


class SameEverywhere(PlainLoader):
    def numbers(self, batch: int) -> list[int]:
        first = batch * self.size * self.batch_size
        return list(range(first, first + self.batch_size))


class Strided(PlainLoader):
    def numbers(self, batch: int) -> list[int]:
        first = batch * self.size * self.batch_size
        return [first + row * self.size + self.rank for row in range(self.batch_size)]


class Overlaps(PlainLoader):
    def numbers(self, batch: int) -> list[int]:
        first = batch * self.size * self.batch_size + self.rank * (self.batch_size - 1)
        return list(range(first, first + self.batch_size))


class AdvancesAlone(PlainLoader):
    """Tests for the end of a shard at the rank's own position, as DataLoaderLite does."""

    def walk(self, begin: int) -> Iterator[Batch]:
        step = self.batch_size * self.length
        for shard, count in enumerate(self.counts):
            position = self.rank * step
            while position + step + 1 <= count:
                rows = self.read(shard, position, step + 1).astype(np.int64)
                shape = (self.batch_size, self.length)
                pieces = (rows[:-1].reshape(shape), rows[1:].reshape(shape))
                yield torch.from_numpy(pieces[0].copy()), torch.from_numpy(pieces[1].copy())
                position += step * self.size


class QuantumPerShard(PlainLoader):
    """Drops from each shard what does not fill a batch on every rank."""

    def sequences_in(self, count: int) -> int:
        window = self.batch_size * self.size
        return super().sequences_in(count) // window * window


class DropsAnExactFit(PlainLoader):
    def sequences_in(self, count: int) -> int:
        return max(0, count - 2) // self.length


class UnevenTail(PlainLoader):
    def walk(self, begin: int) -> Iterator[Batch]:
        yield from super().walk(begin)
        rest = self.num_sequences() - self.num_batches() * self.batch_size * self.size
        if rest >= (self.rank + 1) * self.batch_size:
            yield self.batch(self.num_batches())


class RepeatsTheFirst(PlainLoader):
    def num_batches(self) -> int:
        return -(-self.num_sequences() // (self.batch_size * self.size))

    def find(self, number: int) -> tuple[int, int]:
        return super().find(number % self.num_sequences())


class YieldsShortBatch(PlainLoader):
    def num_batches(self) -> int:
        return -(-self.num_sequences() // (self.batch_size * self.size))

    def numbers(self, batch: int) -> list[int]:
        return [n for n in super().numbers(batch) if n < self.num_sequences()] or [0]


class StopsAtShortShard(PlainLoader):
    def files(self, paths: Any) -> list[Path]:
        found = super().files(paths)
        self.length = max(1, self.length)
        return list(
            itertools.takewhile(lambda path: self.sequences_in(self.count_of(path)) > 0, found)
        )

    def check_files(self) -> None:
        pass


class SortsFiles(PlainLoader):
    def files(self, paths: Any) -> list[Path]:
        return sorted(super().files(paths))


class OneShot(PlainLoader):
    def __iter__(self) -> Iterator[Batch]:
        return self.walk(self.yielded)


class NeverEnds(PlainLoader):
    def walk(self, begin: int) -> Iterator[Batch]:
        for index in itertools.count(begin):
            yield self.batch(index % self.num_batches())


class IgnoresEnvironment(PlainLoader):
    def from_environment(self) -> tuple[int, int]:
        return 0, 1


class EnvironmentWins(PlainLoader):
    def who(self, rank: int | None, size: int | None) -> tuple[int, int]:
        return self.from_environment() if "RANK" in os.environ else super().who(rank, size)


class Backwards(PlainLoader):
    def find(self, number: int) -> tuple[int, int]:
        return super().find(self.num_sequences() - 1 - number)


def _card(
    loader: type[PlainLoader], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    return Impostor(
        f"data.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(loader)
    )


_ORDER = "data.partition.global-order"

IMPOSTORS = (
    _card(
        Rolls,
        "rolls-targets",
        "The last column's target is the row's first token.",
        "`y = x.roll(-1)`, in many a notebook.",
        "With a long context it is one target in a thousand.",
        "data.partition.shifted-by-one",
    ),
    _card(
        NoShift,
        "no-shift",
        "The targets are the inputs.",
        "A model that shifts by itself, swapped for one that does not.",
        "The loss falls, to zero even.",
        "data.partition.shifted-by-one",
    ),
    _card(
        Backwards,
        "backwards",
        "Reads from the last sequence to the first.",
        "An index that is popped from the end of a list.",
        "Every token is read exactly once.",
        "data.partition.sequences-in-order",
        _ORDER,
    ),
    _card(
        Interleaves,
        "contiguous-per-row",
        "Each row of the batch has a part of the data to itself.",
        "Truncated back-propagation lays out its data so; Megatron's and fairseq's old loaders.",
        "Every token is read once, on one rank.",
        _ORDER,
    ),
    _card(
        OneStream,
        "one-stream",
        "A sequence runs from the end of one shard into the next.",
        "A course's base loader concatenates what is left of a shard with the next one.",
        "One sequence per shard.",
        "data.partition.sequences-stay-in-a-shard",
        _ORDER,
    ),
    _card(
        SameEverywhere,
        "same-on-all-ranks",
        "Every rank reads the data of rank 0.",
        "RANK that is read before torchrun's environment arrives.",
        "The loss falls as it does on one rank.",
        "data.partition.ranks-differ",
        "data.partition.rank-from-environment",
        _ORDER,
    ),
    _card(
        Strided,
        "strided",
        "Deals the sequences of a step out one by one.",
        "torch's DistributedSampler.",
        "The global batch is the same set: only its order depends on W.",
        "data.partition.any-world-size",
        _ORDER,
    ),
    _card(
        Overlaps,
        "overlapping-offsets",
        "Neighbouring ranks share a sequence.",
        "rank * (batch_size - 1), where the T + 1 of a buffer was confused with B.",
        "Nobody counts.",
        "data.partition.ranks-differ",
        _ORDER,
    ),
    _card(
        AdvancesAlone,
        "advances-alone",
        "Each rank tests for the end of the shard at its own position.",
        "build-nanogpt DataLoaderLite and llm.c train_gpt2.py; four pull requests argue about it.",
        "Shards of 100 million tokens end rarely.",
        "data.partition.ranks-change-shard-together",
        _ORDER,
    ),
    _card(
        QuantumPerShard,
        "quantum-per-shard",
        "Drops up to W * B sequences of every shard.",
        "A course's distributed loader, beside a base loader that does not.",
        "Its own runs are consistent; only the baseline sees other tokens.",
        _ORDER,
    ),
    _card(
        DropsAnExactFit,
        "drops-an-exact-fit",
        "Drops a last sequence that fits exactly.",
        "modded-nanogpt: `pos + n + 1 >= len`; 129 tokens give one of two sequences of 64.",
        "Shards rarely end there.",
        _ORDER,
        "data.partition.equally-many-batches",
    ),
    _card(
        UnevenTail,
        "uneven-tail",
        "The first ranks get one batch more.",
        "datasets' split_dataset_by_node: 17 rows on 3 ranks give 6, 6, 5.",
        "It covers the data, and hangs at the end of the epoch.",
        "data.partition.equally-many-batches",
    ),
    _card(
        RepeatsTheFirst,
        "repeats-the-first",
        "Fills the last batch with the first sequences.",
        "torch's DistributedSampler without drop_last.",
        "All ranks have equally many batches.",
        "data.partition.equally-many-batches",
        _ORDER,
    ),
    _card(
        YieldsShortBatch,
        "yields-short-batch",
        "The last batch is shorter.",
        "DataLoader without drop_last.",
        "Shapes are dynamic in eager mode.",
        "data.partition.equally-many-batches",
    ),
    _card(
        StopsAtShortShard,
        "stops-at-short-shard",
        "A shard without a sequence ends the pass.",
        "`if not batch: return` in the loop over the shards.",
        "Only the last shard of a corpus is short.",
        "data.partition.short-shards",
    ),
    _card(
        SortsFiles,
        "sorts-files",
        "Sorts the paths as strings.",
        "sorted(glob(...)) inside the loader.",
        "With zero-padded names given in order nothing changes.",
        "data.partition.callers-order",
    ),
    _card(
        OneShot,
        "one-shot",
        "The second `iter` goes on where the first one stopped.",
        "Position kept on the loader; a course's loaders share it between iterators.",
        "One epoch is all that most runs see.",
        "data.partition.one-pass-per-iter",
    ),
    _card(
        NeverEnds,
        "never-ends",
        "Begins again by itself.",
        "Loaders for a fixed number of steps: build-nanogpt, modded-nanogpt.",
        "The training loop counts steps, not batches.",
        "data.partition.one-pass-per-iter",
        "data.partition.equally-many-batches",
    ),
    _card(
        IgnoresEnvironment,
        "ignores-environment",
        "Takes rank 0 of 1 where no rank is given.",
        "A default argument of `rank=0, world_size=1`.",
        "Every rank reads everything and the loss falls.",
        "data.partition.rank-from-environment",
    ),
    _card(
        EnvironmentWins,
        "environment-wins",
        "Takes RANK and WORLD_SIZE even where a rank is given.",
        "`int(os.environ.get('RANK', rank))`.",
        "Evaluation on one rank reads a part of the data and says nothing.",
        "data.partition.arguments-win",
    ),
)
