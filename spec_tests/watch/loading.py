"""What a training is fed by: data loaders, their samplers, and what their data sets draw."""

from __future__ import annotations

import operator
import os
import random
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from .guard import observe
from .layout import VIEWS, mixed_places
from .link import script_line
from .window import tensors_of

_DEPTH, _LOOKED_AT, _OF_EACH, _WORDS = 8, 64, 8, 20_000
_PLAIN = (str, bytes, int, float, bool, Path, type(None))
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
    observe("__iter__", loader.DataLoader, before=_begun, after=_iterated)
    observe("__next__", loader._BaseDataLoaderIter, after=_taken)
    observe("_next_index", loader._BaseDataLoaderIter, after=_drawn)
    fetcher = torch_data._utils.fetch._MapDatasetFetcher
    observe("fetch", fetcher, around=_fetch, is_watched=lambda: True)  # in workers, too


class Feed:
    """One pass over a data loader; `fields` are sent with each step that it feeds."""

    def __init__(self, loader: Any, iterator: Any, coming: deque[list[int]]) -> None:
        sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
        is_split = isinstance(sampler, torch_data.DistributedSampler)
        # The one that a script is to give the epoch.
        both = (sampler, loader.batch_sampler)
        self.sampler = next((each for each in both if hasattr(each, "set_epoch")), None)
        self.coming = coming
        self.first: list[int] = []
        # Samples that no rank but this one is to have: an order of its own over all of its data.
        self.is_own = type(sampler) is torch_data.RandomSampler and not sampler.replacement
        is_stream = iterator._dataset_kind == torch_data._DatasetKind.Iterable
        self.batches: list[list[int]] = []  # the first ones of a stream that workers load
        self.steps = self.rows = self.given = 0
        is_drawn_again = is_stream or getattr(sampler, "replacement", False)
        is_known = not is_drawn_again and getattr(iterator, "_in_order", True)
        self.fields: dict[str, Any] = {
            "pass": _state["pass"],
            "place": script_line(),
            "batches": _length(loader),
            "workers": loader.num_workers if is_stream else 0,
            "split": _split(sampler) if is_split else None,
            "data": _identity(loader.dataset) if is_known else None,
            "indices": [],
            "size": 0,
            "epoch": 0,  # passes that a training has begun until this one
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
        workers = self.fields["workers"]
        if workers > 1 and is_large and len(self.batches) < 3 * workers:
            self.batches.append(_rows(tensors))
            groups = [self.batches[i::workers] for i in range(workers)]
            different = {tuple(each) for each in groups[0]}
            if len(different) == 3 and all(group == groups[0] for group in groups):
                self.fields["doubled"] = workers


class Feeds:
    """The passes over loaders that have begun, and which one the next training forward is of."""

    def __init__(self) -> None:
        self.current: Feed | None = None
        self.epochs = 0
        # Indices of batches that are on their way: workers are given them some batches before.
        self.coming: weakref.WeakKeyDictionary[Any, deque[list[int]]] = weakref.WeakKeyDictionary()
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


def _begun(probe: Any, loader: Any) -> None:
    _state["pass"] += 1
    if loader._iterator is not None:  # with workers that go on: its last pass is over
        probe.feeds.of.pop(loader._iterator, None)
        probe.feeds.coming.pop(loader._iterator, None)
    os.environ[_RANK] = str(os.getpid())


def _iterated(probe: Any, iterator: Any, loader: Any) -> None:
    if hasattr(iterator, "_dataset_kind"):
        coming = probe.feeds.coming.setdefault(iterator, deque())
        probe.feeds.of[iterator] = Feed(loader, iterator, coming)


def _drawn(probe: Any, indices: Any, iterator: Any) -> None:
    """Take what the sampler gives, which a loader hands to its workers some batches before."""
    numbers = []
    with suppress(TypeError):  # keys that are no numbers
        numbers = [*map(operator.index, indices if isinstance(indices, list) else [indices])]
    probe.feeds.coming.setdefault(iterator, deque()).append(numbers)


def _taken(probe: Any, batch: Any, iterator: Any) -> None:
    probe.feeds.current = feed = probe.feeds.of.get(iterator)
    if feed is not None:
        feed.begin()
    # Not of an object, such as a batch of graphs, whose first dim need not be that of samples.
    tensors = [t for t in tensors_of((batch,)) if t.dim() and t.layout is torch.strided]
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


# ------------------------------------------------------------------- whether data sets are the same
# No sample is read, since that may be slow, draw random numbers or augment. A data set of which two
# ranks hold different parts differs in what it holds: a list of files, an array of labels, a path.


def _identity(data: Any) -> int | None:
    """Return a hash of what a data set holds; None where it has no table of its samples."""
    with suppress(Exception):  # the code of a script: its length, its attributes
        if _has_table(data):
            return zlib.crc32("\n".join(islice(_words(data, _DEPTH), _WORDS)).encode())
    return None


def _has_table(data: Any) -> bool:
    """Return whether it holds something with an entry for each sample, as files or labels."""
    if not isinstance(data, torch_data.Dataset):
        return _tells(data, len(data))
    held, size = [*vars(data).values()], len(data)  # type: ignore[arg-type]
    small = [each for each in held if isinstance(each, list | tuple) and len(each) <= _LOOKED_AT]
    held += [each for values in small for each in values]
    inner = [each for each in held if isinstance(each, torch_data.Dataset)]
    return all(map(_has_table, inner)) if inner else any(_tells(each, size) for each in held)


def _tells(value: Any, size: int) -> bool:
    """Return whether it has `size` entries that are not all alike, and no mere count of them."""
    is_kept_elsewhere = isinstance(getattr(value, "_fingerprint", None), str)  # Hugging Face
    is_table = isinstance(value, list | tuple) or _is_array(value) or is_kept_elsewhere
    if not is_table or len(value) != size or is_kept_elsewhere:
        return is_table and len(value) == size
    some = _some(value)
    if all(isinstance(each, int | float) for each in some):
        return len({b - a for a, b in pairwise(some)}) > 1
    return len({" ".join(_words(each, 3)) for each in some}) > 1  # of an object, its type alone


def _some(value: Any) -> Sequence[Any]:
    """Return some entries of a list, a tensor, an array or a table of pandas."""
    rows = getattr(value, "iloc", value)[:: max(1, len(value) // _LOOKED_AT)]
    if isinstance(rows, list | tuple):
        return rows
    array = rows if isinstance(rows, Tensor) else rows.__array__()
    flat = array.reshape(len(array), -1)  # a view, also of what is mapped from a file
    found: list[Any] = flat[:, :: max(1, flat.shape[1] // _OF_EACH)].reshape(-1).tolist()
    return found


def _is_array(value: Any) -> bool:
    is_array = type(value).__module__.partition(".")[0] in ("numpy", "pandas")
    return (is_array or isinstance(value, Tensor)) and len(getattr(value, "shape", ())) > 0


def _words(value: Any, depth: int) -> Iterator[str]:
    yield type(value).__name__
    if isinstance(value, torch_data.Dataset):
        value = sorted(vars(value).items())
    elif isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for each in _some(value) if depth else ():
            yield from _words(each, depth - 1)
    elif _is_array(value):
        yield f"{tuple(value.shape)} {_some(value)}"
    elif isinstance(getattr(value, "_fingerprint", None), str):
        yield value._fingerprint
