"""Every rank reads its own tokens of the same files."""

import os

import torch
from data.data_loader import BaseDataLoader


class DistributedDataLoader(BaseDataLoader):
    """Yields inputs and targets [local_batch_size, sequence_length]."""

    def __init__(
        self, file_paths, local_batch_size, sequence_length, device, rank=None, world_size=None
    ):
        super().__init__(file_paths, local_batch_size, sequence_length, device)
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size

    def sequences(self):
        """One token more than a sequence, one after another through all files."""
        length = self.sequence_length
        for path in self.file_paths:
            tokens = torch.from_numpy(self.read(path).astype("int64"))
            for start in range(0, len(tokens) - length, length):
                yield tokens[start : start + length + 1]

    def __iter__(self):
        first = self.rank * self.local_batch_size
        waiting = []
        for sequence in self.sequences():
            waiting.append(sequence)
            if len(waiting) == self.world_size * self.local_batch_size:
                mine = torch.stack(waiting[first : first + self.local_batch_size])
                mine = mine.to(self.device)
                yield mine[:, :-1].clone(), mine[:, 1:].clone()
                waiting = []
