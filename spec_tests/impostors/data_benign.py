"""Right but unusual loaders: every clause up to level `correct` must accept these."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch

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


class Steps(NamedTuple):
    """A pair with names."""

    inputs: torch.Tensor
    targets: torch.Tensor


class CountsSequences(PlainLoader):
    """An iterator of its own class; pairs with names; a state in sequences of all ranks."""

    def __iter__(self) -> Iterator[Batch]:
        self.index, self.begin = self.begin, 0
        self.yielded = self.index
        return _Pass(self)

    def pair(self, rows: torch.Tensor) -> Batch:
        return Steps(*super().pair(rows))

    def count_of(self, path: Path) -> int:
        path.stat()  # an OSError where there is nothing
        return super().count_of(path)

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": torch.tensor(self.yielded * self.batch_size * self.size)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(
            {"batches": int(state["sequences"]) // self.batch_size // self.size}
        )


class _Pass:
    def __init__(self, loader: CountsSequences) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.loader.index == self.loader.num_batches():
            raise StopIteration
        self.loader.index += 1
        self.loader.yielded = self.loader.index
        return self.loader.batch(self.loader.index - 1)


def _card(loader: type[PlainLoader], words: str, does: str) -> Impostor:
    return Impostor(f"benign.loader-{words}", does, "", "", (), functions=lambda: offer(loader))


IMPOSTORS = (
    _card(PlainLoader, "plain", "The base of the data impostors: reads row by row."),
    _card(ReadsWhole, "in-memory", "Keeps whole shards in memory."),
    _card(MapsAndCopies, "memory-map", "Copies out of memory maps."),
    _card(Prefetches, "prefetches", "A thread reads two batches ahead."),
    _card(CountsSequences, "counts-sequences", "Its state counts sequences of all ranks."),
)
