"""After an interrupted backward, reset_iter_state and zero_grad, FSDP2 adds the failed step's
gradients to the next step's.

Expected: the mean over the two ranks, 1.5
Got: the failed step's 100 are added, 101.5
Versions: torch 2.13.0, checked 2026-11-23
Clause: fsdp.lifecycle.after-exception
Case: *-backward-reset
See: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
"""

import contextlib
import sys
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
EXPECTED = [1.5] * RANKS


def fail(*args: Any) -> None:
    """Stand for an error in the backward, such as a lack of memory."""
    raise KeyError


def observe(rank: int) -> float:
    """Return the second layer's gradient in a clean step after an interrupted backward."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    fully_shard(model)
    sharded = model[1].weight
    handle = model[0].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    with contextlib.suppress(KeyError):
        model(torch.full((1, 1), 100.0)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return float(sharded.grad.full_tensor())


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
