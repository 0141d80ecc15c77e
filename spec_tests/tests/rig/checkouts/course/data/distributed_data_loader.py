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

    def __iter__(self):
        length, window = self.sequence_length, self.world_size * self.local_batch_size
        first = self.rank * self.local_batch_size
        for path in self.file_paths:  # what does not fill a step of all ranks is left in each
            tokens = torch.from_numpy(self.read(path).astype("int64"))
            for start in range(0, len(tokens) - window * length, window * length):
                begins = range(start + first * length, start + window * length, length)
                rows = [tokens[b : b + length + 1] for b in begins[: self.local_batch_size]]
                mine = torch.stack(rows).to(self.device)
                yield mine[:, :-1].clone(), mine[:, 1:].clone()
