"""ZeroRedundancyOptimizer sends wrong rows of a parameter that is a part of a larger tensor.

Expected: all ones after a step from twos along gradients of ones, on both ranks
Got: on rank 1 the last rows are old, and what lies between the rows has changed
Versions: torch 2.13.0, checked 2026-11-24
Clause: zero1.step.parts-of-larger-tensors
Case: *
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [[1.0] * 9] * RANKS


def observe(rank: int) -> list[float]:
    """Return a weight of three columns of a 3 x 4 tensor after a step from twos to ones."""
    whole = torch.full((3, 4), 2.0)
    weight = nn.Parameter(whole[:, :3])
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    return weight.flatten().tolist()


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
