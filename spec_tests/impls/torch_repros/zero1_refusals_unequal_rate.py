"""ZeroRedundancyOptimizer takes ranks with unequal learning rates without an error.

Expected: an error on every rank
Got: each parameter is updated at the rate of the rank that owns it
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.refusals.unequal-ranks
Case: *-rate
See: https://docs.pytorch.org/docs/stable/distributed.optim.html
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
EXPECTED = ["an error"] * RANKS


def observe(rank: int) -> str:
    """Return the error, or the weights after a step."""
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    try:
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=[0.5, 0.25][rank])
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    except Exception:
        return "an error"
    return f"weights {[float(weight[0]) for weight in weights]}"


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
