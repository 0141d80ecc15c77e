"""FSDP2 with one rank per shard group divides by the gradient divide factor twice.

Expected: a sum over two replicas of 1 + 1, divided by the factor 2: 1
Got: divided by it twice, 0.5
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.divide-factor-over-replicas
Case: *-4x1
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.0] * RANKS


def observe(rank: int) -> float:
    """Return a gradient of a step on a mesh of two replicas and no shards."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    return float(gradient.full_tensor()[0, 0])


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
