"""FSDP2 on a hybrid mesh does not average over replicas the gradient of a unit that the last
micro-batch does not use.

Expected: the mean over ranks 0 to 3 of the first micro-batch, 1.5
Got: no gradient at all: it comes with the next window
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.accumulation.all-reduce-at-the-last
Case: *-unused-in-last
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
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

RANKS = 4
EXPECTED = [1.5] * RANKS


class Pair(nn.Module):
    """Two layers, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor, use_two: bool) -> torch.Tensor:
        """Return the sum of one or both."""
        return self.one(x).sum() + (self.two(x).sum() if use_two else 0.0)


def observe(rank: int) -> float | None:
    """Return the gradient of the layer that only the first of two micro-batches uses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Pair()
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=mesh)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 1), float(rank)), use_two=True).backward()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1), use_two=False).backward()
    gradient = model.two.weight.grad
    return None if gradient is None else float(gradient.full_tensor()[0, 0])


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
