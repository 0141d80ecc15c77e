"""Near-misses of the state of a loader, and right but unusual loaders."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

from spec_tests.museum.card import Source, benign
from spec_tests.museum.catalogue.data_files import KEEPS_SHARDS
from spec_tests.plain.loader import PlainLoader

LOADER = Source("spec_tests.plain.loader")
REFERENCE = Source("solution.data.loader")

LOADER.near_miss(
    "data.counts-iter",
    "data.state.counts-what-was-yielded",
    "- self.yielded = begin",
    "+ self.yielded = min(begin + 1, self.num_batches())",
    does="Making an iterator counts as a batch.",
    seen="A first batch that is fetched when the iterator is made.",
    unseen="Checkpoints are taken after step one.",
)

LOADER.near_miss(
    "data.one-place-for-all",
    "data.partition.independent-passes",
    "- for index in range(begin, self.num_batches()):",
    "+ while (index := self.yielded) < self.num_batches():",
    does="Lets all iterators of a loader read on at one place.",
    seen="The position is an attribute of the loader, and `__iter__` returns self.",
    unseen="Nobody iterates twice at a time, until an evaluation looks at a batch.",
)

LOADER.near_miss(
    "data.keeps-tensor",
    "data.state.is-plain-data",
    '- return {"batches": self.yielded}',
    '+ return {"batches": torch.tensor(self.yielded)}',
    "...",
    '- self.begin = self.yielded = state["batches"]',
    '+ self.begin = self.yielded = int(state["batches"])',
    does="Has a tensor in its state.",
    seen="A counter that was a buffer; JSON and a reader's eye find nothing to read.",
    unseen="torch.save takes it.",
)

LOADER.near_miss(
    "data.counts-own-sequences",
    "data.state.another-world-size",
    '- return {"batches": self.yielded}',
    '+ return {"sequences": self.yielded * self.batch_size}',
    "...",
    '- self.begin = self.yielded = state["batches"]',
    '+ self.begin = self.yielded = state["sequences"] // self.batch_size',
    does="Counts the sequences of this rank alone.",
    seen="Per-rank positions, as in build-nanogpt and llm.c.",
    unseen="At the same world size it is right.",
)

LOADER.near_miss(
    "data.counts-since-resume",
    "data.state.of-a-resumed-pass",
    "- self.yielded = index + 1",
    "+ self.yielded = index + 1 - begin",
    does="After a resume the count begins at zero.",
    seen="accelerate issue 2859: skipped batches are not counted.",
    unseen="Wrong from the second restart on.",
)

LOADER.near_miss(
    "data.stays-at-resume",
    ("data.state.resumes-exactly", "data.state.at-any-place"),
    "- begin, self.begin = self.begin, 0",
    "+ begin = self.begin",
    does="Every later pass begins where the run was resumed.",
    seen="A start that is not cleared once it was used.",
    unseen="Few runs have a second epoch after a restart.",
)

LOADER.near_miss(
    "data.wraps-at-end",
    "data.state.at-the-end",
    '- self.begin = self.yielded = state["batches"]',
    '+ self.begin = self.yielded = state["batches"] % self.num_batches()',
    does="A state from the end of a pass begins a whole one.",
    seen="Position modulo length.",
    unseen="A run that had stopped exactly there trains an epoch too many.",
)

LOADER.near_miss(
    "data.forgets-state",
    (
        "data.state.resumes-exactly",
        "data.state.at-any-place",
        "data.state.another-world-size",
        "data.state.load-moves-a-used-loader",
        "data.state.at-the-end",
        "data.state.of-a-resumed-pass",
    ),
    '- self.begin = self.yielded = state["batches"]',
    "+ pass",
    does="Accepts a state and starts from the beginning.",
    seen="nanoGPT issue 467: resuming repeats the seed's batches.",
    unseen="The loss goes on falling.",
)

LOADER.benign(
    "benign.loader-memory-map",
    '- return np.fromfile(path, dtype="<u2", count=self.length + 1, offset=offset)',
    '+ return np.array(np.memmap(path, "<u2", "r", offset, self.length + 1))',
    does="Copies out of memory maps.",
)


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


# Batches are pairs with names, of no generator, and what is not there is an OSError.
LOADER.benign(
    "benign.loader-counts-sequences",
    "- for index in range(begin, self.num_batches()):",
    "-     batch = self.batch(index)",
    "-     self.yielded = index + 1",
    "-     yield batch",
    "+ from collections import namedtuple",
    '+ steps = namedtuple("Steps", "inputs targets")',
    "+ def counted(index):",
    "+     self.yielded = index + 1",
    "+     return steps(*self.batch(index))",
    "+ return map(counted, range(begin, self.num_batches()))",
    "...",
    '- return {"batches": self.yielded}',
    '+ return {"sequences": torch.tensor(self.yielded * self.batch_size * self.size)}',
    "...",
    '- self.begin = self.yielded = state["batches"]',
    '+ self.begin = self.yielded = int(state["sequences"]) // self.batch_size // self.size',
    "...",
    "- if not path.is_file():",
    '-     raise ValueError(f"{path}: no such file")',
    "+ path.stat()",
    does="Its state counts sequences of all ranks.",
)

LOADER.benign("benign.loader-plain", does="The base of the data impostors: reads row by row.")

LOADER.benign("benign.loader-in-memory", *KEEPS_SHARDS, does="Keeps whole shards in memory.")

LOADER.near_miss(
    "data.hands-out-one-dict",
    "data.state.is-a-snapshot",
    '- return {"batches": self.yielded}',
    '+ self.state = getattr(self, "state", {})',
    '+ self.state["batches"] = self.yielded',
    "+ return self.state",
    does="Gives the same dict each time, with the place of now in it.",
    seen="A state that is kept beside the counter, to save an allocation.",
    unseen="Saved at once it is right.",
)

LOADER.near_miss(
    "data.says-the-old-place",
    "data.state.of-what-was-loaded",
    '- self.begin = self.yielded = state["batches"]',
    '+ self.begin = state["batches"]',
    does="Says the place of the pass before, until the next one begins.",
    seen="A counter that `iter` sets, and `load_state_dict` does not.",
    unseen="Training loads once, into a new loader.",
)

REFERENCE.near_miss(
    "data.takes-any-place",
    "data.state.off-the-grid",
    "- if position % self.global_batch_size:",
    "+ if position < 0:",
    does="Takes a place between two batches.",
    seen="A multiple of the rank's batch, and not of all ranks'.",
    unseen="Runs go on with the batch that they had.",
)
