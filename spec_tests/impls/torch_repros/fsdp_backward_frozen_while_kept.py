"""FSDP2 leaves a parameter untrained that was frozen for a step, where full weights are kept.

Expected: after it is thawed, the gradient of its bias is [1, 1]
Got: None: the full parameter that was kept goes on to need no gradient
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.backward.frozen-while-kept
Case: *-backward
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


def observe(rank: int) -> list[float] | None:
    """Return the gradient of a bias that was frozen in the backward before, and is thawed."""
    model = fully_shard(nn.Linear(1, 2))
    bias = model.bias
    model.set_reshard_after_backward(False)
    for trains in (False, True):
        bias.requires_grad_(trains)
        model(torch.ones(1, 1)).sum().backward()
    return None if bias.grad is None else bias.grad.full_tensor().tolist()


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
