"""FSDP2 computes with stale weights after a step, where unshard() was called before it.

Expected: the output of the weights after the step, [0, 0]
Got: the output of the weights before the step, [1, 1]
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.fresh-after-step
Case: *-by-hand*
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
EXPECTED = [[0.0, 0.0]] * RANKS


def observe(rank: int) -> list[float]:
    """Return the output after a step that takes the weights from ones to zeros."""
    layer = nn.Linear(1, 2, bias=False)
    nn.init.ones_(layer.weight)
    model = fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 1)
    model(x).sum().backward()  # the gradient is 1 everywhere
    model.unshard()
    optimizer.step()
    output: list[float] = model(x).flatten().tolist()
    return output


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
