"""torchdata's StatefulDataLoader, behind the contract, over a dataset of windows.

The library divides nothing among ranks: PyTorch's BatchSampler lists the batches of all ranks, and
the loader of a rank takes a slice of each. Position, state and resumption are StatefulDataLoader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from spec_tests.impls.windows import Windows


class _Batches(Sampler[list[int]]):
    """Numbers of the sequences in each batch of one rank."""

    def __init__(self, windows: Windows, batch_size: int) -> None:
        self._windows, self._batch_size = windows, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        size = self._batch_size
        first = self._windows.rank * size
        for start in range(first, len(self._windows), self._windows.world_size * size):
            yield list(range(start, start + size))

    def __len__(self) -> int:
        return len(self._windows) // (self._windows.world_size * self._batch_size)


def token_loader(
    paths: Sequence[Any],
    *,
    batch_size: int,
    sequence_length: int,
    rank: int | None = None,
    world_size: int | None = None,
) -> Any:
    """A StatefulDataLoader without workers, which has the position in its state."""
    windows = Windows(paths, batch_size, sequence_length, rank, world_size)
    return StatefulDataLoader(windows, batch_sampler=_Batches(windows, batch_size), num_workers=0)
