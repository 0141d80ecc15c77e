"""An exception inside ShardedDataParallel.no_sync() leaves synchronisation off for good.

Expected: after the block, left by an exception, a backward reduces: 1.5 on the owner
Got: nothing is reduced: 1.0
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: ddp.no-sync.restores-after-exception
Issue: none found (searched: fairscale ShardedDDP no_sync exception, try finally)
"""

import contextlib
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the mean gradient and that of the owner, in the step after the exception."""
    module = nn.Linear(1, 1, bias=False)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    got = module.weight.grad.item() if rank == 0 else None  # rank 0 owns the weight
    return (1.5 if rank == 0 else None), got


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
