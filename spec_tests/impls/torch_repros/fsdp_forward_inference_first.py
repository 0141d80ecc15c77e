"""FSDP2 cannot train after a first forward under torch.inference_mode().

Expected: a training step after the evaluation gives gradients
Got: RuntimeError "Inplace update to inference tensor outside InferenceMode"
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.forward.evaluation-leaves-no-trace
Case: *-inference-first
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
EXPECTED = ["trained"] * RANKS


def observe(rank: int) -> str:
    """Return how the first training step after an evaluation ends."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return f"{error!s:.70}"
    return "trained"


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
