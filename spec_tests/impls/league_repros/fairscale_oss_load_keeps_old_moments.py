"""OSS.load_state_dict of a state without moments, such as the first step's, keeps the old moments.

Expected: after loading an empty state no parameter has state
Got: the momentum of before the load is still there
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: zero1.state.load-replaces
Issue: none found (searched: fairscale OSS load_state_dict old state kept; the same fault is in PyTorch's ZeroRedundancyOptimizer)
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the number of parameters that have state after an empty state was loaded."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(RANKS)]
    sharded = OSS(parameters, optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    sharded.step()
    fresh = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    sharded.load_state_dict(fresh.state_dict())
    kept = [state for state in sharded.optim.state.values() if state]
    return 0, len(kept)


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
