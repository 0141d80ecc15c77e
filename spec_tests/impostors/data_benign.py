"""Right but unusual loaders: every clause up to level `correct` must accept these."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import numpy as np

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.data_files import ReadsWhole
from spec_tests.impostors.plain_loader import HEADER_BYTES, Batch, PlainLoader, offer


class MapsAndCopies(PlainLoader):
    """A memory map per row, copied out of."""

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        tokens = np.memmap(self.paths[shard], dtype="<u2", mode="r", offset=HEADER_BYTES)
        return np.array(tokens[start : start + count])


class Prefetches(PlainLoader):
    """A thread reads two batches ahead; the state counts what was yielded."""

    def walk(self, begin: int) -> Iterator[Batch]:
        queue: Queue[Any] = Queue()
        room = threading.Semaphore(2)
        is_over = threading.Event()

        def produce() -> None:
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


def _card(loader: type[PlainLoader], words: str, does: str) -> Impostor:
    return Impostor(f"benign.loader-{words}", does, "", "", (), functions=lambda: offer(loader))


IMPOSTORS = (
    _card(PlainLoader, "plain", "The base of the data impostors: reads row by row."),
    _card(ReadsWhole, "in-memory", "Keeps whole shards in memory."),
    _card(MapsAndCopies, "memory-map", "Copies out of memory maps."),
    _card(Prefetches, "prefetches", "A thread reads two batches ahead."),
)
