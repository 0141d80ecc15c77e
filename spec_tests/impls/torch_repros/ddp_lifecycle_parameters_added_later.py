"""DistributedDataParallel trains a parameter that is added later on each rank by itself.

Expected: its gradient is the mean, 2, on both ranks, or there is an error
Got: 1 on the first rank and 3 on the second, and no error
Versions: torch 2.13.0, checked 2026-11-26
Clause: ddp.lifecycle.parameters-added-later
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
EXPECTED = [2.0] * RANKS


def observe(rank: int) -> float:
    """Return the gradient of what is added, which is 1 on the first rank and 3 on the second."""
    layer = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(layer)
    layer.bias = nn.Parameter(torch.zeros(1))
    (wrapped(torch.ones(1, 1)) * (1 + 2 * rank)).sum().backward()
    return layer.bias.grad.item()


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
