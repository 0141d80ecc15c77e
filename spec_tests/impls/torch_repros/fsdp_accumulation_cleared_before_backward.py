"""In FSDP2 the model's zero_grad, between forward and backward, clears nothing of the root.

Expected: the gradient of the bias of one backward, [1, 1]
Got: that of two, [2, 2]: the root shows full parameters then, and its shards keep their gradients
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.accumulation.cleared-before-backward
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
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
EXPECTED = [[1.0, 1.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the gradient of the bias after two steps, each of which clears it late."""
    model = fully_shard(nn.Linear(1, 2))
    bias = model.bias
    for _ in range(2):
        loss = model(torch.ones(1, 1)).sum()
        model.zero_grad()
        loss.backward()
    gradient: list[float] = bias.grad.full_tensor().tolist()
    return gradient


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
