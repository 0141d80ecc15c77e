"""The contract's token shards as a map-style dataset, for libraries that bring only a loader.

What an adapter of such a library is judged by is order, division, state and lifetime. The format of
the files, and the refusals at construction, are this file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from spec_tests.plain.loader import PlainLoader


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences of all shards in order, as pairs of inputs and targets.

    Attributes:
        rank, world_size: as given, or as RANK and WORLD_SIZE say.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        batch_size: int,
        sequence_length: int,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        self._files = PlainLoader(paths, batch_size, sequence_length, rank, world_size)
        self.rank, self.world_size = self._files.rank, self._files.size
        # What does not fill a batch of all ranks is not there at all.
        self._length = self._files.num_batches() * batch_size * self.world_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(self._files.row(number).astype(np.int64))
        return row[:-1].clone(), row[1:].clone()
