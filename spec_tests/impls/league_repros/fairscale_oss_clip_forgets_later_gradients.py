"""OSS.clip_grad_norm remembers which parameters had gradients when it was first called.

Expected: the norm of two gradients of ones of 4 elements each is 2.83
Got: 2.0: the gradient that came after the first call is left out of the norm
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (OSS.clip_grad_norm has no place in the contract)
Issue: none found (searched: fairscale OSS clip_grad_norm _local_params cache wrong norm)
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
    """Return the true norm, and what clip_grad_norm returns the second time it is called."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(RANKS)]
    optimizer = OSS(parameters, optim=torch.optim.SGD, lr=0.1)
    parameters[0].grad = torch.ones(4)  # in the first step the second one is not used
    optimizer.clip_grad_norm(1e9)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return round(8**0.5, 3), round(optimizer.clip_grad_norm(1e9).item(), 3)


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
