"""DistributedDataParallel does not reduce the gradients of a second backward of one forward.

Expected: the mean over ranks of both backwards, 2 * 1.5 = 3 on both ranks, or an error
Got: each rank adds its own second gradient to the mean of the first
Versions: torch 2.13.0, checked 2026-11-23
Clause: ddp.accumulation.backward-twice
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/reducer.cpp
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
EXPECTED = [3.0] * RANKS


def observe(rank: int) -> float | str:
    """Return the gradient after two backwards of one forward, whose gradients are 1 + rank."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    loss = model(torch.full((1, 1), 1.0 + rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    gradient = model.module.weight.grad
    return float(gradient)


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
