"""Real bugs of loaders: positions in their state, and which rank reads what."""

from __future__ import annotations

import random

import torch

from spec_tests.museum.reality import faulty
from spec_tests.plain.loader import PlainLoader


@faulty("open-instruct-681")
class SkipsInEveryPass(PlainLoader):
    """The number of batches to skip is kept after the pass that was resumed.

    https://github.com/allenai/open-instruct/pull/681
    """

    def __iter__(self):
        begin = self.begin
        found = super().__iter__()
        self.begin = begin
        return found


@faulty("kempnerforge-57")
class CountsFromTheResume(PlainLoader):
    """A pass sets its counter to zero, also where it begins in the middle.

    https://github.com/KempnerInstitute/KempnerForge/issues/57
    """

    def __iter__(self):
        found = super().__iter__()
        self.yielded = 0
        return found

    def walk(self, begin):
        for index in range(begin, self.num_batches()):
            batch = self.batch(index)
            self.yielded = index + 1 - begin
            yield batch


@faulty("torchdata-1437")
class ForgetsWhatWasLoaded(PlainLoader):
    """What was loaded shows in the state once the next pass has begun.

    https://github.com/meta-pytorch/data/issues/1437
    """

    def load_state_dict(self, state):
        self.begin = state["batches"]


@faulty("torchdata-1548")
class KeepsItsIterator(PlainLoader):
    """A state is taken of an iterator, which is made for it and used by the next pass, load or not.

    https://github.com/meta-pytorch/data/pull/1548
    """

    iterator = None
    is_unused = False

    def state_dict(self):
        if self.iterator is None:
            self.iterator, self.is_unused = super().__iter__(), True
        return super().state_dict()

    def __iter__(self):
        if not self.is_unused:
            self.iterator = super().__iter__()
        self.is_unused = False
        return self.iterator


@faulty("longlive-71")
class SeedOfTheRank(PlainLoader):
    """The seed of the permutation is a number times the rank: rank 0's order is not the others'.

    https://github.com/NVlabs/LongLive/issues/71
    """

    def numbers(self, batch):
        order = list(range(self.num_sequences()))
        if self.rank:
            random.Random(self.rank).shuffle(order)
        return [order[number] for number in super().numbers(batch)]


@faulty("megatron-bridge-5944")
class DropsAfterDealing(PlainLoader):
    """Batches are dealt out to the ranks, and each drops what is not full at its own end.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5944
    """

    def num_batches(self):
        full = self.num_sequences() // self.batch_size
        return max(0, -(-(full - self.rank) // self.size))


@faulty("torchtitan-816")
class OwnPosition(PlainLoader):
    """A state is this rank's position in its own part, loaded as it is at any number of ranks.

    https://github.com/pytorch/torchtitan/pull/816
    """

    def state_dict(self):
        return {"samples": self.yielded * self.batch_size}

    def load_state_dict(self, state):
        self.begin = self.yielded = state["samples"] // self.batch_size


@faulty("megatron-bridge-5257")
class DrawsABaseSeed(PlainLoader):
    """Each new iterator draws a seed for its workers from torch's global generator.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5257
    """

    def __iter__(self):
        torch.empty((), dtype=torch.int64).random_()
        return super().__iter__()
