"""Near-misses of the state of a loader, and right but unusual loaders."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch

from spec_tests.museum.card import Patched, benign, near_miss
from spec_tests.museum.catalogue.data_files import ReadsWhole
from spec_tests.plain.loader import HEADER_BYTES, Batch, PlainLoader


@near_miss(
    "data.counts-prefetched",
    rejected_by=("data.state.counts-what-was-yielded", "data.state.resumes-exactly"),
)
class CountsAhead(PlainLoader):
    """Counts what a queue has read ahead.

    From: A state dict of the sampler in place of the loader: DataLoader with workers.
    Unseen: Two batches are lost per restart, of thousands.
    """

    def walk(self, begin):
        queue: list[Batch] = []
        for index in range(begin, self.num_batches()):
            queue.append(self.batch(index))
            self.yielded = index + 1
            if len(queue) > 2:
                yield queue.pop(0)
        yield from queue


@near_miss("data.counts-iter", rejected_by="data.state.counts-what-was-yielded")
class CountsIter(CountsAhead):
    """Making an iterator counts as a batch.

    From: A first batch that is fetched when the iterator is made.
    Unseen: Checkpoints are taken after step one.
    """

    def __iter__(self):
        found = super().__iter__()
        self.yielded = min(self.yielded + 1, self.num_batches())
        return found

    walk = PlainLoader.walk


@near_miss("data.one-place-for-all", rejected_by="data.partition.independent-passes")
class OnePlaceForAll(PlainLoader):
    """Lets all iterators of a loader read on at one place.

    From: The position is an attribute of the loader, and `__iter__` returns self.
    Unseen: Nobody iterates twice at a time, until an evaluation looks at a batch.
    """

    def walk(self, begin):
        while self.yielded < self.num_batches():
            self.yielded += 1
            yield self.batch(self.yielded - 1)


@near_miss("data.keeps-tensor", rejected_by="data.state.is-plain-data")
class KeepsTensor(PlainLoader):
    """Has a tensor in its state.

    From: A counter that was a buffer; JSON and a reader's eye find nothing to read.
    Unseen: torch.save takes it.
    """

    def state_dict(self):
        return {"batches": torch.tensor(self.yielded)}

    def load_state_dict(self, state):
        self.begin = self.yielded = int(state["batches"])


@near_miss("data.counts-own-sequences", rejected_by="data.state.another-world-size")
class CountsOwnSequences(PlainLoader):
    """Counts the sequences of this rank alone.

    From: Per-rank positions, as in build-nanogpt and llm.c.
    Unseen: At the same world size it is right.
    """

    def state_dict(self):
        return {"sequences": self.yielded * self.batch_size}

    def load_state_dict(self, state):
        self.begin = self.yielded = state["sequences"] // self.batch_size


@near_miss("data.counts-since-resume", rejected_by="data.state.of-a-resumed-pass")
class CountsSinceResume(PlainLoader):
    """After a resume the count begins at zero.

    From: accelerate issue 2859: skipped batches are not counted.
    Unseen: Wrong from the second restart on.
    """

    def walk(self, begin):
        self.yielded = 0 if begin else self.yielded
        for index in range(begin, self.num_batches()):
            batch = self.batch(index)
            self.yielded += 1
            yield batch


@near_miss(
    "data.stays-at-resume", rejected_by=("data.state.resumes-exactly", "data.state.at-any-place")
)
class StaysAtResume(PlainLoader):
    """Every later pass begins where the run was resumed.

    From: A start that is not cleared once it was used.
    Unseen: Few runs have a second epoch after a restart.
    """

    def __iter__(self):
        self.yielded = self.begin
        return self.walk(self.begin)


@near_miss("data.wraps-at-end", rejected_by="data.state.at-the-end")
class WrapsAtEnd(PlainLoader):
    """A state from the end of a pass begins a whole one.

    From: Position modulo length.
    Unseen: A run that had stopped exactly there trains an epoch too many.
    """

    def load_state_dict(self, state):
        self.begin = self.yielded = state["batches"] % self.num_batches()


@near_miss("data.loads-only-when-new", rejected_by="data.state.load-moves-a-used-loader")
class LoadsOnlyWhenNew(PlainLoader):
    """Ignores a state once it has been used.

    From: An iterator that is kept between epochs.
    Unseen: Everybody resumes with a new loader.
    """

    def load_state_dict(self, state):
        if not self.yielded:
            super().load_state_dict(state)


@near_miss(
    "data.forgets-state",
    rejected_by=(
        "data.state.resumes-exactly",
        "data.state.at-any-place",
        "data.state.another-world-size",
        "data.state.load-moves-a-used-loader",
        "data.state.at-the-end",
        "data.state.of-a-resumed-pass",
    ),
)
class ForgetsState(PlainLoader):
    """Accepts a state and starts from the beginning.

    From: nanoGPT issue 467: resuming repeats the seed's batches.
    Unseen: The loss goes on falling.
    """

    def load_state_dict(self, state):
        pass


@benign("benign.loader-memory-map")
class MapsAndCopies(PlainLoader):
    """Copies out of memory maps."""

    def read(self, shard, start, count):
        tokens = np.memmap(self.paths[shard], dtype="<u2", mode="r", offset=HEADER_BYTES)
        return np.array(tokens[start : start + count])


@benign("benign.loader-prefetches")
class Prefetches(PlainLoader):
    """A thread reads two batches ahead."""

    def walk(self, begin):
        queue: Queue[Any] = Queue()
        room = threading.Semaphore(2)
        is_over = threading.Event()

        def produce():
            for index in range(begin, self.num_batches()):
                room.acquire()
                if is_over.is_set():
                    return
                queue.put(self.batch(index))

        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        try:
            for index in range(begin, self.num_batches()):
                batch = queue.get()
                room.release()
                self.yielded = index + 1
                yield batch
        finally:
            is_over.set()
            room.release()
            thread.join()


class Steps(NamedTuple):
    """A pair with names."""

    inputs: torch.Tensor
    targets: torch.Tensor


@benign("benign.loader-counts-sequences")
class CountsSequences(PlainLoader):
    """Its state counts sequences of all ranks."""

    def __iter__(self):
        self.index, self.begin = self.begin, 0
        self.yielded = self.index
        return _Pass(self)

    def pair(self, rows):
        return Steps(*super().pair(rows))

    def count_of(self, path):
        path.stat()  # an OSError where there is nothing
        return super().count_of(path)

    def state_dict(self):
        return {"sequences": torch.tensor(self.yielded * self.batch_size * self.size)}

    def load_state_dict(self, state):
        super().load_state_dict(
            {"batches": int(state["sequences"]) // self.batch_size // self.size}
        )


class _Pass:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return self

    def __next__(self):
        if self.loader.index == self.loader.num_batches():
            raise StopIteration
        self.loader.index += 1
        self.loader.yielded = self.loader.index
        return self.loader.batch(self.loader.index - 1)


@benign("benign.loader-plain")
class LoaderPlain(PlainLoader):
    """The base of the data impostors: reads row by row."""


@benign("benign.loader-in-memory")
class LoaderInMemory(ReadsWhole):
    """Keeps whole shards in memory."""


@near_miss("data.hands-out-one-dict", rejected_by="data.state.is-a-snapshot")
class HandsOutOneDict(PlainLoader):
    """Gives the same dict each time, with the place of now in it.

    From: A state that is kept beside the counter, to save an allocation.
    Unseen: Saved at once it is right.
    """

    def state_dict(self):
        self.state = getattr(self, "state", {})
        self.state.update(super().state_dict())
        return self.state


@near_miss("data.says-the-old-place", rejected_by="data.state.of-what-was-loaded")
class SaysTheOldPlace(PlainLoader):
    """Says the place of the pass before, until the next one begins.

    From: A counter that `iter` sets, and `load_state_dict` does not.
    Unseen: Training loads once, into a new loader.
    """

    def load_state_dict(self, state):
        self.begin = state["batches"]


@near_miss("data.takes-any-place", rejected_by="data.state.off-the-grid")
class TakesAnyPlace(Patched):
    """Takes a place between two batches.

    From: A multiple of the rank's batch, and not of all ranks'.
    Unseen: Runs go on with the batch that they had.
    """

    module = "solution.data.loader"
    find = "        if position % self.global_batch_size:"
    replace = "        if position < 0:"
