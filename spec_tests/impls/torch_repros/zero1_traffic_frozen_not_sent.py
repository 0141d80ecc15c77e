"""ZeroRedundancyOptimizer broadcasts frozen parameters in every step.

Expected: a step sends the 4 elements that are trained
Got: it sends the 1000 frozen ones as well
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.traffic.frozen-not-sent
See: https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

import sys
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 2
EXPECTED = [4] * RANKS


def observe(rank: int) -> int:
    """Return how many elements a step broadcasts."""
    trained, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1000), False)
    optimizer = ZeroRedundancyOptimizer([trained, frozen], torch.optim.SGD, lr=0.1)
    trained.grad = torch.ones(4)
    sent = []
    usual = dist.broadcast

    def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return usual(tensor, *args, **options)

    dist.broadcast = counting
    optimizer.step()
    dist.broadcast = usual
    return sum(sent)


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
