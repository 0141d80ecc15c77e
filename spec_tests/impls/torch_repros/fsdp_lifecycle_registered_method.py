"""A registered method that forward calls frees the weights that forward still computes with.

Expected: the output of the plain model, 2
Got: RuntimeError "got mixed torch.Tensor and DTensor"
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.registered-method
Case: *-forward-calls-method-freed
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

RANKS = 2
EXPECTED = [2.0] * RANKS


class Encoder(nn.Module):
    """A forward that computes on after it called a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x @ self.weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum that needs the weight again, after the method."""
        return (self.encode(x) @ self.weight).sum()


def observe(rank: int) -> float | str:
    """Return the output, or the error."""
    model = Encoder()
    fully_shard(model, reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    try:
        output = model(torch.ones(1, 1)).detach()
        return float(output)
    except RuntimeError as error:
        return f"{error!s:.90}"


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
