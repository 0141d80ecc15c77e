"""What a training is fed by: data loaders, their samplers, and what their data sets draw."""

from __future__ import annotations

import operator
import os
import random
import sys
import weakref
import zlib
from collections import deque
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from .datasets import identity
from .guard import hooked, quiet, wrapped_in_forks
from .layout import VIEWS, mixed_places
from .link import script_line
from .window import tensors_of

_ENOUGH = 64  # elements of a batch: two smaller ones may be equal by chance
_KEPT_ROWS = 8192  # of one pass over a loader
_ORDERED = 16  # samples that show an order: no two passes begin with the same ones by chance
_RANK = "TRAINSPEC_RANK"  # in the environment: the process whose workers these are
_LOOKS = 3  # steps in which the files of workers are read
_state: dict[str, Any] = {"pass": 0, "folder": ""}  # handed on to workers, which are forks
_looked: set[tuple[int, int]] = set()  # process and pass whose first fetch was looked at


def start(folder: str) -> None:
    """Observe the data loaders of this process."""
    _state["folder"] = folder
    loader: Any = torch_data.dataloader
    owner = loader.DataLoader
    owner.__iter__ = hooked(owner.__iter__, before=_begun, after=_iterated)
    base = loader._BaseDataLoaderIter
    base.__next__ = hooked(base.__next__, after=_taken)
    base._next_index = hooked(base._next_index, after=_drawn)
    fetcher: Any = torch_data._utils.fetch._MapDatasetFetcher
    fetcher.fetch = wrapped_in_forks(fetcher.fetch, _fetch)


class Feed:
    """One pass over a data loader; `fields` are sent with each step that it feeds."""

    def __init__(self, loader: Any, iterator: Any, early: list[list[int]]) -> None:
        sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
        is_split = isinstance(sampler, torch_data.DistributedSampler)
        # The one that a script is to give the epoch.
        both = (sampler, loader.batch_sampler)
        self.sampler = next((each for each in both if hasattr(each, "set_epoch")), None)
        # Indices of batches that are on their way: workers are given them some batches before.
        self.coming = deque(early)
        self.first: list[int] = []
        # Samples that no rank but this one is to have: an order of its own over all of its data.
        self.is_own = type(sampler) is torch_data.RandomSampler and not sampler.replacement
        is_stream = iterator._dataset_kind == torch_data._DatasetKind.Iterable
        self.workers = loader.num_workers if is_stream else 0
        self.batches: list[list[int]] = []  # the first ones of a stream that workers load
        self.steps = self.rows = self.given = 0
        is_drawn_again = is_stream or getattr(sampler, "replacement", False)
        is_known = not is_drawn_again and getattr(iterator, "_in_order", True)
        self.fields: dict[str, Any] = {
            "pass": _state["pass"],
            "place": script_line(),
            "batches": _length(loader),
            "workers": self.workers,
            "split": _split(sampler) if is_split else None,
            "data": identity(loader.dataset) if is_known else None,
            "indices": [],
            "size": 0,
            "epoch": 0,  # passes that a training has begun until this one
            "by_epoch": self.sampler is not None,
            "again": False,
            "doubled": 0,
            "rows": [],
            "draws": [],
        }

    def begin(self) -> None:
        """A batch has come: keep which samples it has."""
        indices = self.coming.popleft() if self.coming else []
        self.given += 1
        self.first += indices[: _ORDERED - len(self.first)]
        self.fields["size"] = len(indices)
        # The last one may be filled up with samples of the first.
        is_last = self.given == self.fields["batches"]
        is_kept = self.fields["data"] is not None and self.given * len(indices) < _KEPT_ROWS
        self.fields["indices"] += indices if is_kept and not is_last else []

    def order(self) -> Any:
        """Return what tells a shuffled order that needs an epoch from others, if it is known."""
        if self.fields["split"] is not None:
            return self.fields["split"]["epoch"] if self.fields["split"]["shuffle"] else None
        is_shuffled = any(b < a for a, b in pairwise(self.first))
        is_meant = self.sampler is not None and getattr(self.sampler, "shuffle", True)
        is_known = len(self.first) == _ORDERED and is_shuffled and is_meant
        return (getattr(self.sampler, "epoch", None), *self.first) if is_known else None

    def take(self, tensors: list[Tensor]) -> None:
        """Look at a batch where its samples may be another rank's, or another worker's."""
        self.fields["size"] = self.fields["size"] or len(tensors[0])
        if self.is_own and self.rows < _KEPT_ROWS:
            rows = _rows(tensors)
            self.rows += len(rows)
            self.fields["rows"] += rows
        is_large = sum(t.numel() for t in tensors) >= _ENOUGH
        if self.workers > 1 and is_large and len(self.batches) < 3 * self.workers:
            self.batches.append(_rows(tensors))
            groups = [self.batches[i :: self.workers] for i in range(self.workers)]
            different = {tuple(each) for each in groups[0]}
            if len(different) == 3 and all(group == groups[0] for group in groups):
                self.fields["doubled"] = self.workers


class Feeds:
    """The passes over loaders that have begun, and which one the next training forward is of."""

    def __init__(self) -> None:
        self.current: Feed | None = None
        self.early: list[list[int]] = []  # indices that an iterator takes while it is made
        self.epochs = 0
        self.of: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()

    def train(self) -> Feed | None:
        """A training forward begins: with what the last loader gave, if no evaluation took it."""
        feed = self.current
        if feed is None:
            return None
        if not feed.fields["epoch"]:
            self.epochs += 1
            feed.fields["epoch"] = self.epochs
        order = feed.order()
        if order is not None:
            orders = self._trained.setdefault(feed.sampler, {})
            number = orders.setdefault(order, feed.fields["pass"])
            feed.fields["again"] = number != feed.fields["pass"]
        return feed


def fields(feed: Feed | None) -> dict[str, Any] | None:
    """Return what a step says of the loader that fed it."""
    if feed is None:
        return None
    feed.steps += 1
    if feed.steps <= _LOOKS and not feed.fields["draws"]:
        found = Path(_state["folder"]).glob(f"draws-{os.getpid()}-{feed.fields['pass']}-*")
        feed.fields["draws"] = sorted({word for file in found for word in file.read_text().split()})
    taken = dict(feed.fields)
    feed.fields["rows"], feed.fields["indices"] = [], []
    return taken


@quiet
def _begun(probe: Any, loader: Any) -> None:
    _state["pass"] += 1
    probe.feeds.early = []
    if loader._iterator is not None:  # with workers that go on: its last pass is over
        probe.feeds.of.pop(loader._iterator, None)
    os.environ[_RANK] = str(os.getpid())


@quiet
def _iterated(probe: Any, iterator: Any, loader: Any) -> None:
    if hasattr(iterator, "_dataset_kind"):
        probe.feeds.of[iterator] = Feed(loader, iterator, probe.feeds.early)


@quiet
def _drawn(probe: Any, indices: Any, iterator: Any) -> None:
    """Take what the sampler gives, which a loader hands to its workers some batches before."""
    feed, numbers = probe.feeds.of.get(iterator), []
    with suppress(TypeError):  # keys that are no numbers
        numbers = [*map(operator.index, indices if isinstance(indices, list) else [indices])]
    (probe.feeds.early if feed is None else feed.coming).append(numbers)


@quiet
def _taken(probe: Any, batch: Any, iterator: Any) -> None:
    probe.feeds.current = feed = probe.feeds.of.get(iterator)
    if feed is not None:
        feed.begin()
    tensors = [t for t in tensors_of(batch) if t.dim() and t.layout is torch.strided]
    if feed is not None and tensors:
        feed.take(tensors)


def _length(loader: Any) -> int | None:
    with suppress(Exception):
        return len(loader)
    return None


def _split(sampler: Any) -> dict[str, Any]:
    """Return how a DistributedSampler divides which order of how many samples."""
    return {
        "shuffle": bool(sampler.shuffle),
        "seed": sampler.seed,
        "epoch": sampler.epoch,
        "parts": sampler.num_replicas,
        "part": sampler.rank,
        "size": _length(sampler.dataset),
    }


def _rows(tensors: list[Tensor]) -> list[int]:
    """Return a hash of each sample of a batch."""
    size = len(tensors[0])
    total = torch.zeros(size, dtype=torch.int64)
    for index, tensor in enumerate(tensors):
        if len(tensor) != size or not tensor.numel() or tensor.is_complex():
            continue
        flat = tensor.detach().cpu().reshape(size, -1).contiguous().view(torch.uint8)
        dtype = next(dtype for dtype, width in VIEWS if flat.shape[1] % width == 0)
        words = flat.view(dtype).to(torch.int64) + 1
        total += (words * mixed_places(words.shape[1], words.device)).sum(1) * (2 * index + 1)
    return total.tolist()


def _fetch(original: Any, fetcher: Any, *arguments: Any) -> Any:
    """Load a batch, here or in a worker, and write down what its samples drew from, if anything."""
    key = (os.getpid(), _state["pass"])
    if key in _looked or os.environ.get(_RANK) not in (str(key[0]), str(os.getppid())):
        return original(fetcher, *arguments)
    _looked.add(key)
    before = _generators()
    batch = original(fetcher, *arguments)
    after = _generators()
    drawn = [f"{name}:{state}" for name, state in before.items() if after.get(name) != state]
    if drawn:
        name = f"draws-{os.environ[_RANK]}-{key[1]}-{key[0]}"
        with suppress(OSError):
            (Path(_state["folder"]) / name).write_text(" ".join(drawn))
    return batch


def _generators() -> dict[str, int]:
    """Return a hash of the state of each of the process's own random generators."""
    found = {"random": hash(random.getstate()[1])}
    found["torch"] = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        _, keys, place, *_ = numpy.get_state()
        found["numpy"] = hash((zlib.crc32(keys.tobytes()), place))
    return found
