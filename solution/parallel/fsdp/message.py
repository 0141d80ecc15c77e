"""The buffers of all-gathers and reduce-scatters: where rows lie in them, and their memory.

A parameter `[n, ...]` is cut along dim 0 into W pieces as `torch.chunk` cuts it: each of
`ceil(n / W)` rows, the last ones shorter or empty. Many parameters share a collective, which needs
each rank's pieces in one stretch of memory. So a message is a matrix `[W, m]`: its row r holds rank
r's pieces, one parameter after another, each with room for `ceil(n / W)` rows of its parameter.

    message    |  weight     |  bias |      a weight of 5 rows and a bias of 3 over W = 2 ranks;
    rank 0     | row 0 1 2   |  0 1  |      x: padding, sent and never read
    rank 1     | row 3 4 x   |  2 x  |

All whole pieces of a parameter are one strided view of the matrix, and the rest is a second, so
copying in or out costs one or two copies per parameter, whatever W is.

Filling fresh memory costs about as much as sending it, so messages of one pass share a pool of
memory, which is emptied at the end of the pass. Making a view takes as long as copying a small
tensor, so views are kept with the memory, also while it is empty.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from operator import is_

import torch

from solution import comm
from solution.parallel.fsdp.param import ShardedParameter, rows_of

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Layout:
    """The places of unsharded tensors in a message `[W, m]`; `width` is m, padding included.

    >>> layout = Layout([torch.Size([5, 2]), torch.Size([3])], rank=1, num_ranks=2)
    >>> layout.width, layout.rows
    (8, [slice(3, 5, None), slice(2, 3, None)])
    """

    def __init__(self, shapes: Sequence[torch.Size], rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.rows = [rows_of(shape[0], rank, num_ranks) for shape in shapes]  # of this rank
        own = zip(self.rows, shapes, strict=True)
        self._piece_shapes = [torch.Size([r.stop - r.start, *shape[1:]]) for r, shape in own]
        self._sizes = [-(-shape[0] // num_ranks) * shape[1:].numel() for shape in shapes]
        self.width = sum(self._sizes)

    def pieces(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return views of this rank's `row` `[m]`: its piece of each tensor, in the piece's shape.

        >>> layout = Layout([torch.Size([5, 2]), torch.Size([3])], rank=1, num_ranks=2)
        >>> [piece.tolist() for piece in layout.pieces(torch.arange(8))]
        [[[0, 1], [2, 3]], [6]]
        """
        found = []
        for place, shape in zip(row.split(self._sizes), self._piece_shapes, strict=True):
            is_short = shape.numel() < place.numel()
            found.append((place[: shape.numel()] if is_short else place).view(shape))
        return found

    def places(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of all ranks' pieces of each tensor, `[W, ...]`."""
        return matrix.split(self._sizes, dim=1)

    def pairs(
        self, tensors: Sequence[torch.Tensor | None], places: Sequence[torch.Tensor]
    ) -> Pairs:
        """Return pairs of views with the same elements: of a contiguous tensor, and of its place.

        >>> tensor, matrix = torch.arange(5), torch.zeros(2, 3, dtype=torch.int64)
        >>> layout = Layout([tensor.shape], rank=0, num_ranks=2)
        >>> for rows, row_places in layout.pairs([tensor], layout.places(matrix)):
        ...     _ = row_places.copy_(rows)
        >>> matrix.tolist()
        [[0, 1, 2], [3, 4, 0]]
        """
        found: Pairs = []
        for tensor, place, size in zip(tensors, places, self._sizes, strict=True):
            if tensor is None:
                continue
            if tensor.numel() == place.numel():  # W divides the rows: one view is enough
                found.append((tensor.view(place.shape), place))
                continue
            flat = tensor.view(-1)
            whole = flat.numel() // size
            found.append((flat[: whole * size].view(whole, size), place[:whole]))
            rest = flat[whole * size :]
            if rest.numel():
                found.append((rest, place[whole, : rest.numel()]))
        return found


_made = lru_cache(maxsize=1024)(Layout)  # the same in every step


def layout_of(parameters: Sequence[ShardedParameter], group: comm.Group) -> Layout:
    """Return the layout of messages for `parameters` between the ranks of `group`."""
    return _made(tuple(p.shape for p in parameters), comm.rank(group), comm.size(group))


class _Memory:
    """A stretch of memory that can grow or be emptied under the views of it."""

    def __init__(self, device: torch.device) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.messages: dict[tuple[object, ...], Message] = {}
        self.is_taken = False


# What is sent for an absent gradient. x + -0.0 is x for every x, so a sum is -0.0 only where all
# ranks sent -0.0. Of a present gradient the first number in each rank's piece is never -0.0.
ABSENT = -0.0


def is_absent(place: torch.Tensor) -> bool:
    """Whether all ranks sent `ABSENT` there, or nothing but -0.0. Waits for the device.

    Args:
        place: a rank's own piece of a sum of messages, its padding included.
    """
    return bool(((place == 0) & torch.signbit(place)).all())


class Message:
    """The buffer of one collective for parameters of one dtype: a `matrix` `[W, m]` in `memory`."""

    def __init__(
        self,
        parameters: list[ShardedParameter],
        dtype: torch.dtype,
        layout: Layout,
        memory: _Memory,
    ) -> None:
        self.parameters = parameters
        self.layout = layout
        self.memory = memory
        self.matrix = torch.empty(0, dtype=dtype, device=memory.storage.device)
        self.matrix.set_(memory.storage, 0, (layout.num_ranks, layout.width), (layout.width, 1))
        self._own = layout.pieces(self.matrix[layout.rank])
        self._places = layout.places(self.matrix)
        self._tensors: Sequence[torch.Tensor] = ()
        self._pairs: Pairs = []
        # The first column of each place, and as many zeros: made when they are needed.
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill_own(self, pieces: Sequence[torch.Tensor]) -> None:
        """Copy this rank's pieces to its row."""
        copy(list(zip(self._own, pieces, strict=True)))

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy unsharded tensors, which are new every time, to all rows, those that are there."""
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is not None and tensor.numel() < place.numel():
                # A rank without rows looks at its padding.
                whole, rest = divmod(tensor.numel(), place.shape[1])
                place[whole, rest:].zero_()
                place[whole + 1 :].zero_()
        pairs = self.layout.pairs(tensors, self._places)
        copy([(places, rows) for rows, places in pairs])

    def mark(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Fill places of absent gradients with `ABSENT`; make all others differ from it."""
        if self._first is None:
            self._first = self._first_numbers()
        columns, zeros = self._first
        self.matrix.index_add_(1, columns, zeros)  # -0.0 becomes 0.0, all else stays
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is None:
                place.fill_(ABSENT)

    def keep_marks(self, total: torch.Tensor, mean: torch.Tensor) -> None:
        """Let first numbers of `mean`, the divided `total`, be -0.0 only where `total`'s are."""
        assert self._first is not None
        columns, _ = self._first
        first = total.index_select(0, columns)
        marks = torch.where((first == 0) & torch.signbit(first), ABSENT, 0.0)
        mean.index_add_(0, columns, marks.to(mean.dtype))

    def _first_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [place.shape[1] for place in self._places]
        starts = itertools.accumulate(sizes, initial=0)
        filled = [start for start, size in zip(starts, sizes, strict=False) if size]
        columns = torch.tensor(filled, dtype=torch.int64, device=self.matrix.device)
        return columns, self.matrix.new_zeros(len(self.matrix), len(filled))

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy all rows to unsharded tensors, which usually are the same every time."""
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if not is_same:
            self._tensors, self._pairs = tensors, self.layout.pairs(tensors, self._places)
        copy(self._pairs)


class BufferPool:
    """The memory of messages, shared by the units of a model and emptied when a pass ends."""

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    def take(
        self, parameters: list[ShardedParameter], dtype: torch.dtype, group: comm.Group
    ) -> Message:
        """Return a message for `parameters` between the ranks of `group`, with undefined contents.

        It is the caller's until `give_back`; later calls may return the same one.
        """
        layout = layout_of(parameters, group)
        num_bytes = layout.num_ranks * layout.width * dtype.itemsize
        memory = self._smallest(num_bytes, parameters[0].local.device)
        key = parameters[0], dtype, layout.num_ranks  # another list of parameters replaces it
        message = memory.messages.get(key)
        if message is None or message.parameters != parameters:
            message = Message(parameters, dtype, layout, memory)
            memory.messages[key] = message
        memory.is_taken = True
        return message

    def give_back(self, message: Message) -> None:
        """Return the memory of `message` to the pool, once nothing reads or writes it."""
        message.memory.is_taken = False

    def empty(self) -> None:
        """Free all memory that is not in use."""
        for memory in self._memories:
            if not memory.is_taken:
                memory.storage.resize_(0)

    def _smallest(self, num_bytes: int, device: torch.device) -> _Memory:
        """Return the smallest unused memory that is large enough, or enlarge the largest."""
        free = [m for m in self._memories if not m.is_taken and m.storage.device == device]
        free.sort(key=lambda memory: memory.storage.nbytes())
        found = next((m for m in free if m.storage.nbytes() >= num_bytes), None)
        if found is not None:
            return found
        if not free:
            free.append(_Memory(device))
            self._memories += free
        free[-1].storage.resize_(0)  # or the values would be copied
        free[-1].storage.resize_(num_bytes)
        return free[-1]


def outside_of_autograd() -> AbstractContextManager[None]:
    """Disable autograd, inference mode and `torch.func`: what one forward makes serves the next."""
    is_transformed = torch._C._are_functorch_transforms_active()
    is_plain = not (is_transformed or torch.is_inference_mode_enabled())
    return torch.no_grad() if is_plain else _outside_of_transforms()


@contextmanager
def _outside_of_transforms() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield


def copy(pairs: Pairs) -> None:
    """Copy the second tensor of each pair to the first, converting dtypes."""
    if pairs:
        targets, values = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(values))
