"""FSDP2 keeps unreduced gradients where zero_grad does not reach them, and reduces them with the
next step's.

Expected: the gradient of the micro-batch after zero_grad, 1
Got: that of the discarded micro-batch is added, 101
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.accumulation.zero-grad-discards
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.0] * RANKS


def observe(rank: int) -> float:
    """Return the gradient of a window whose first micro-batch was discarded."""
    model = fully_shard(nn.Linear(1, 1, bias=False))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 100.0)).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    return float(gradient.full_tensor())


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
