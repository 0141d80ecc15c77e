"""MMEngine's ZeroRedundancyOptimizer.state_dict() is an empty dict on all ranks but the first.

Expected: the state dict on every rank, or an error
Got: {} on rank 1
Versions: mmengine 0.10.7, torch 2.13.0, checked 2026-11-23
Clause: MMCLAUSE
Issue: none found (searched: mmengine ZeroRedundancyOptimizer state_dict empty rank consolidate)
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.optim import ZeroRedundancyOptimizer
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the keys of the state dict that each rank should have, and those that it has."""
    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), "SGD", lr=0.1)
    return ["param_groups", "state"], sorted(optimizer.state_dict())


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=RANKS)
        expected, got = zip(*(torch.load(f"{folder}/{r}") for r in range(RANKS)), strict=True)
    print(f"expected on each rank: {expected}\ngot:                   {got}")
    return int(expected != got)


if __name__ == "__main__":
    try:
        status = _main()  # 1: the fault is there
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
