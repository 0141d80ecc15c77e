"""Without buckets a gradient of an earlier micro-batch is never reduced if the last does not use it.

Expected: the first layer's gradient, all from inside no_sync, is the mean 1.5 on its owner
Got: the owner's own local gradient
Versions: fairscale 0.4.13, torch 2.13.0, checked 2026-11-23
Clause: none (reduce_buffer_size=0 is not the default)
Issue: none found (searched: fairscale ShardedDDP no_sync unused parameter reduce_buffer_size 0 gradient not reduced)
"""

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
    """Return the mean and the owner's gradient of a layer that only the first micro-batch uses."""
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    module.forward = lambda x, which: module[which](x)
    optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.0)
    model = ShardedDataParallel(module, optimizer, reduce_buffer_size=0)
    x = torch.full((1, 1), rank + 1.0)
    with model.no_sync():
        model(x, 0).sum().backward()
    model(x, 1).sum().backward()
    got = module[0].weight.grad.item() if rank == 0 else None  # rank 0 owns the first layer
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
