"""A message: parameters of one dtype on their way between ranks, and the memory it lies in.

Filling fresh memory costs about as much as sending it, so within a pass messages use the same
stretches of memory, *slabs*, one after another. Between steps a model is its shards: when a pass
ends, slabs are emptied. What stays is where things lie in them. To make a view takes as long as to
copy a small tensor, so a message keeps its views for the next time that it lies in that slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_

import torch

from solution import comm
from solution.parallel.fsdp.layout import Layout, Pairs, layout_of
from solution.parallel.fsdp.param import ShardedParameter


class Message:
    """Parameters of one dtype on their way.

    Attributes:
        parameters: in the order in which they lie in it.
        layout: where.
        matrix: `[W, m]`; what it holds at first is undefined.
    """

    def __init__(
        self, parameters: list[ShardedParameter], layout: Layout, rank: int, matrix: torch.Tensor
    ) -> None:
        self.parameters = parameters
        self.layout = layout
        self.matrix = matrix
        self._own = layout.pieces(matrix[rank], rank)
        self._places = layout.places(matrix)
        self._fulls: Sequence[torch.Tensor] = ()
        self._pairs: Pairs = []

    def fill_own(self, pieces: Sequence[torch.Tensor]) -> None:
        """Fill this rank's row."""
        copy(list(zip(self._own, pieces, strict=True)))

    def fill(self, fulls: Sequence[torch.Tensor]) -> None:
        """Fill all rows, from tensors that are new every time."""
        pairs = self.layout.pairs(fulls, self._places)
        copy([(places, rows) for rows, places in pairs])

    def copy_to(self, fulls: Sequence[torch.Tensor]) -> None:
        """Copy all rows out, into tensors that are the same every time, mostly."""
        is_same = len(fulls) == len(self._fulls) and all(map(is_, fulls, self._fulls))
        if not is_same:
            self._fulls, self._pairs = fulls, self.layout.pairs(fulls, self._places)
        copy(self._pairs)


class _Slab:
    """A stretch of memory that grows, and is emptied, under the views that there are of it."""

    def __init__(self, device: torch.device) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._messages: dict[tuple[object, ...], Message] = {}

    def grow(self, num_bytes: int) -> None:
        """Hold so many bytes at least; what it held is lost."""
        if self.storage.nbytes() < num_bytes:
            self.storage.resize_(0)
            self.storage.resize_(num_bytes)

    def message(
        self, parameters: list[ShardedParameter], dtype: torch.dtype, layout: Layout, rank: int
    ) -> Message:
        """The message for these; the one that lay here before, if there was one."""
        key = parameters[0], dtype, layout.num_ranks  # so there are only so many
        found = self._messages.get(key)
        if found is None or found.parameters != parameters:
            matrix = torch.empty(0, dtype=dtype, device=self.storage.device)
            matrix.set_(self.storage, 0, (layout.num_ranks, layout.width), (layout.width, 1))
            found = self._messages[key] = Message(parameters, layout, rank, matrix)
        return found


class Buffers:
    """Memory for messages; the schedule empties it when a pass ends."""

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []
        self._lent: dict[Message, _Slab] = {}

    def take(
        self, parameters: list[ShardedParameter], dtype: torch.dtype, group: comm.Group
    ) -> Message:
        """A message for these parameters between the ranks of `group`."""
        layout = layout_of(tuple(p.shape for p in parameters), comm.size(group))
        slab = self._smallest(
            layout.num_ranks * layout.width * dtype.itemsize, parameters[0].local.device
        )
        message = slab.message(parameters, dtype, layout, comm.rank(group))
        self._lent[message] = slab
        return message

    def give(self, message: Message) -> None:
        """Take back what `take` gave, once nothing reads or writes it."""
        del self._lent[message]

    def empty(self) -> None:
        """Give the memory back of all that is not lent."""
        for slab in self._unused():
            slab.storage.resize_(0)

    def _smallest(self, num_bytes: int, device: torch.device) -> _Slab:
        """The smallest that is free and fits, else the largest that is free, or a new one."""
        free = [slab for slab in self._unused() if slab.storage.device == device]
        free.sort(key=lambda slab: slab.storage.nbytes())
        fitting = [slab for slab in free if slab.storage.nbytes() >= num_bytes]
        if fitting:
            return fitting[0]
        if not free:
            free.append(_Slab(device))
            self._slabs += free
        free[-1].grow(num_bytes)
        return free[-1]

    def _unused(self) -> list[_Slab]:
        lent = set(self._lent.values())
        return [slab for slab in self._slabs if slab not in lent]


def outside_of_autograd() -> AbstractContextManager[None]:
    """Nothing is recorded, and what is made here serves a training step after an evaluation."""
    return _outside_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def copy(pairs: Pairs) -> None:
    """Copy the second of each pair into the first, whatever their dtypes."""
    if pairs:
        into, values = zip(*pairs, strict=True)
        torch._foreach_copy_(list(into), list(values))
