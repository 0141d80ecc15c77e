"""Where a rank uses one parameter of a unit more than the others, gloo aborts under FSDP2.

Expected: the mean with zero for the absent, or an error
Got: a process is ended by SIGABRT
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.backward.unused-on-some-ranks
Case: *-one-more
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = "trained, or an error was raised"


class Branches(nn.Module):
    """Two layers of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Return what the one layer makes, or both."""
        found: torch.Tensor = self.both(self.first(x) if is_first else x)
        return found


def on_rank(rank: int, folder: str) -> None:
    """Take a step in which the first rank uses both layers."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = fully_shard(Branches())
    model(torch.ones(1, 4), rank == 0).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    got = EXPECTED
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(on_rank, (folder,), nprocs=RANKS, join=False).processes
        for rank in ranks:
            rank.join(60)
        for number, rank in enumerate(ranks):
            if rank.is_alive() or (rank.exitcode or 0) < 0:
                end = "still waits" if rank.is_alive() else f"died with {rank.exitcode}"
                got = f"rank {number} {end}"
            rank.kill()
    print(f"expected: {EXPECTED}\ngot:      {got}")
    return int(got != EXPECTED)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
