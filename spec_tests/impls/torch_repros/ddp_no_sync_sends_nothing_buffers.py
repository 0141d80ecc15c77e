"""DistributedDataParallel broadcasts buffers in the first forward inside no_sync.

Expected: inside no_sync nothing is sent: each rank keeps its own buffer
Got: rank 1 has the buffer of rank 0
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.no-sync.sends-nothing
Case: *-buffers
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
EXPECTED = [0.0, 1.0]


class Marked(nn.Module):
    """A layer and a buffer."""

    mark: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mark", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return self.layer(x)


def observe(rank: int) -> float:
    """Return the buffer, which is the rank's number, after a forward inside no_sync."""
    module = Marked()
    model = DistributedDataParallel(module)
    model(torch.ones(1, 1)).sum().backward()
    module.mark.fill_(rank)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    return float(module.mark)


def on_rank(rank: int, folder: str) -> None:
    """Join the process group and write what this rank got to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (folder,), nprocs=RANKS)
        got = [torch.load(f"{folder}/{rank}") for rank in range(RANKS)]
    print(f"expected: {EXPECTED}\ngot:      {got}")
    return int(got != EXPECTED)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
