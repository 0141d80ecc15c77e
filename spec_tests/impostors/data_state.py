"""Near-misses of the loader's state: the first run is right, the one after the stop is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_loader import Batch, PlainLoader, offer


class CountsAhead(PlainLoader):
    """A queue of two batches; the state is what the producer has read."""

    def walk(self, begin: int) -> Iterator[Batch]:
        queue: list[Batch] = []
        for index in range(begin, self.num_batches()):
            queue.append(self.batch(index))
            self.yielded = index + 1
            if len(queue) > 2:
                yield queue.pop(0)
        yield from queue


class CountsIter(CountsAhead):
    def __iter__(self) -> Iterator[Batch]:
        found = super().__iter__()
        self.yielded = min(self.yielded + 1, self.num_batches())
        return found

    walk = PlainLoader.walk


class CountsLate(PlainLoader):
    """The counter moves when the next batch is asked for."""

    def walk(self, begin: int) -> Iterator[Batch]:
        for index in range(begin, self.num_batches()):
            yield self.batch(index)
            self.yielded = index + 1


class OnePlaceForAll(PlainLoader):
    """An iterator reads on where the loader is, not where it has come to itself."""

    def walk(self, begin: int) -> Iterator[Batch]:
        while self.yielded < self.num_batches():
            self.yielded += 1
            yield self.batch(self.yielded - 1)


class KeepsTensor(PlainLoader):
    def state_dict(self) -> dict[str, Any]:
        return {"batches": torch.tensor(self.yielded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.yielded = int(state["batches"])


class CountsOwnSequences(PlainLoader):
    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.yielded * self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.yielded = state["sequences"] // self.batch_size


class RestartsShard(PlainLoader):
    """Goes on at the first batch of the shard in which it stopped."""

    def state_dict(self) -> dict[str, Any]:
        window, first = self.batch_size * self.size, 0
        for count in self.counts:
            held = self.sequences_in(count)
            if first + held > self.yielded * window:
                break
            first += held
        return {"batches": min(self.yielded, -(-first // window))}


class CountsSinceResume(PlainLoader):
    def walk(self, begin: int) -> Iterator[Batch]:
        self.yielded = 0 if begin else self.yielded
        for index in range(begin, self.num_batches()):
            batch = self.batch(index)
            self.yielded += 1
            yield batch


class StaysAtResume(PlainLoader):
    def __iter__(self) -> Iterator[Batch]:
        self.yielded = self.begin
        return self.walk(self.begin)


class WrapsAtEnd(PlainLoader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.yielded = state["batches"] % self.num_batches()


class LiveState(PlainLoader):
    def __init__(self, *args: Any) -> None:
        self.live: dict[str, Any] = {"batches": 0}
        super().__init__(*args)

    @property
    def yielded(self) -> int:
        return self.live["batches"]

    @yielded.setter
    def yielded(self, number: int) -> None:
        self.live["batches"] = number

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = self.yielded = state["batches"]


class LoadsOnlyWhenNew(PlainLoader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.yielded:
            super().load_state_dict(state)


class ForgetsState(PlainLoader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _card(
    loader: type[PlainLoader], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    return Impostor(
        f"data.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(loader)
    )


_EXACT = "data.state.resumes-exactly"
_ANYWHERE = "data.state.at-any-place"

IMPOSTORS = (
    _card(
        CountsAhead,
        "counts-prefetched",
        "Counts what a queue has read ahead.",
        "A state dict of the sampler in place of the loader: DataLoader with workers.",
        "Two batches are lost per restart, of thousands.",
        "data.state.counts-what-was-yielded",
        _EXACT,
    ),
    _card(
        CountsIter,
        "counts-iter",
        "Making an iterator counts as a batch.",
        "A first batch that is fetched when the iterator is made.",
        "Checkpoints are taken after step one.",
        "data.state.counts-what-was-yielded",
    ),
    _card(
        CountsLate,
        "counts-late",
        "A batch counts only when the next one is asked for.",
        "A counter after `yield`, where it runs one batch late.",
        "One batch is read twice per restart.",
        _EXACT,
        _ANYWHERE,
    ),
    _card(
        CountsOwnSequences,
        "counts-own-sequences",
        "Counts the sequences of this rank alone.",
        "Per-rank positions, as in build-nanogpt and llm.c.",
        "At the same world size it is right.",
        "data.state.another-world-size",
    ),
    _card(
        RestartsShard,
        "restarts-shard",
        "Goes on at the start of the shard.",
        "The file index is saved and the position in it is not.",
        "The loss is even better: those tokens are known.",
        _ANYWHERE,
        _EXACT,
    ),
    _card(
        CountsSinceResume,
        "counts-since-resume",
        "After a resume the count begins at zero.",
        "accelerate issue 2859: skipped batches are not counted.",
        "Wrong from the second restart on.",
        "data.state.of-a-resumed-pass",
    ),
    _card(
        StaysAtResume,
        "stays-at-resume",
        "Every later pass begins where the run was resumed.",
        "A start that is not cleared once it was used.",
        "Few runs have a second epoch after a restart.",
        _EXACT,
        _ANYWHERE,
    ),
    _card(
        WrapsAtEnd,
        "wraps-at-end",
        "A state from the end of a pass begins a whole one.",
        "Position modulo length.",
        "A run that had stopped exactly there trains an epoch too many.",
        "data.state.at-the-end",
    ),
    _card(
        LiveState,
        "live-state",
        "Hands out the dict that it goes on counting in.",
        "`return self.__dict__`; asynchronous checkpoints write it later.",
        "Written at once, it is right.",
        "data.state.is-a-snapshot",
    ),
    _card(
        LoadsOnlyWhenNew,
        "loads-only-when-new",
        "Ignores a state once it has been used.",
        "An iterator that is kept between epochs.",
        "Everybody resumes with a new loader.",
        "data.state.load-moves-a-used-loader",
    ),
    _card(
        ForgetsState,
        "forgets-state",
        "Accepts a state and starts from the beginning.",
        "nanoGPT issue 467: resuming repeats the seed's batches.",
        "The loss goes on falling.",
        _EXACT,
        _ANYWHERE,
        "data.state.another-world-size",
        "data.state.load-moves-a-used-loader",
        "data.state.at-the-end",
        "data.state.of-a-resumed-pass",
    ),
    _card(
        OnePlaceForAll,
        "one-place-for-all",
        "Lets all iterators of a loader read on at one place.",
        "The position is an attribute of the loader, and `__iter__` returns self.",
        "Nobody iterates twice at a time, until an evaluation looks at a batch.",
        "data.partition.independent-passes",
    ),
    _card(
        KeepsTensor,
        "keeps-tensor",
        "Has a tensor in its state.",
        "A counter that was a buffer; JSON and a reader's eye find nothing to read.",
        "torch.save takes it.",
        "data.state.is-plain-data",
    ),
)
