"""FSDP2 makes a dataclass among the inputs anew, and the code of its class runs a second time.

Expected: the output 2: the class doubles what it is given, once
Got: 4
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.forward.containers-of-ones-own
Case: *-computing-dataclass
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import sys
import tempfile
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [2.0] * RANKS


@dataclass
class Doubled:
    """An input whose class computes."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = 2 * self.x


class Layer(nn.Linear):
    """Takes it."""

    def forward(self, box: Doubled) -> torch.Tensor:  # type: ignore[override]  # a container
        """Return what the layer makes of the doubled input."""
        return super().forward(box.x)


def observe(rank: int) -> float:
    """Return the output of a layer of ones for a one that is doubled."""
    layer = Layer(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    output: torch.Tensor = fully_shard(layer)(Doubled(torch.ones(1, 1, requires_grad=True)))
    return output.detach().mean().item()


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
