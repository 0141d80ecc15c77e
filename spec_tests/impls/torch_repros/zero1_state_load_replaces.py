"""ZeroRedundancyOptimizer.load_state_dict keeps the old moments where the loaded state has none.

Expected: the step after the load moves a weight by 1, as with torch.optim.SGD
Got: by 1 + 0.5: the momentum from before the load goes on
Versions: torch 2.13.0, checked 2026-11-23
Clause: zero1.state.load-replaces
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
EXPECTED = [[1.0, 1.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return how far a step moves the weights after an empty state was loaded."""
    weights = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=1.0, momentum=0.5)
    moved = []
    for _ in range(2):
        if not moved:
            for to in range(RANKS):  # each rank keeps the state of before the first step
                optimizer.consolidate_state_dict(to=to)
                if to == rank:
                    empty = optimizer.state_dict()
        before = [float(weight) for weight in weights]
        for weight in weights:
            weight.grad = torch.ones(())
        optimizer.step()
        moved = [old - float(new) for old, new in zip(before, weights, strict=True)]
        optimizer.load_state_dict(empty)
    return moved


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
