"""clip_grad_norm_ of order infinity loses a NaN that is on another rank than the first.

Expected: nan on both ranks
Got: the largest number of the rank without NaN
Versions: torch 2.13.0, checked 2026-11-23
Clause: clip.nonfinite.largest-of-nan
Case: *-1
See: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 2
EXPECTED = ["nan"] * RANKS


def observe(rank: int) -> str:
    """Return the largest element of a gradient that has a NaN on the last rank."""
    mesh = init_device_mesh("cpu", (RANKS,))
    local = torch.tensor([3.0 if rank == 0 else float("nan")])
    weight = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)]))
    weight.grad = DTensor.from_local(local, mesh, [Shard(0)])
    norm = nn.utils.clip_grad_norm_([weight], 100.0, float("inf"))
    return str(float(norm.full_tensor()))


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
