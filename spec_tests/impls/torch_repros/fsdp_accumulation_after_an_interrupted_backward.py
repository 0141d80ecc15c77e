"""In FSDP2 a backward that raised leaves a gradient in the root that the model's zero_grad misses.

Expected: the gradient of the root's bias in the step after it, [1, 1]
Got: [2, 2]: the root shows full parameters still, and the shard keeps what is unreduced
Versions: torch 2.13.0, checked 2026-11-25
Clause: fsdp.accumulation.after-an-interrupted-backward
See: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
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
EXPECTED = [[1.0, 1.0]] * RANKS


def raises(*_: object) -> None:
    """Raise, as a hook of the backward that runs out of memory would."""
    raise KeyError("planted")


def observe(rank: int) -> list[float]:
    """Return the gradient of the root's bias after a step that a failed one came before."""
    model: Any = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    bias = model[1].bias
    handle = model[0].register_forward_hook(lambda m, x, out: out.register_hook(raises) and None)
    loss = model(torch.ones(1, 1)).sum()
    handle.remove()
    with contextlib.suppress(KeyError):
        loss.backward()
    getattr(model, "reset_iter_state", lambda: None)()
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
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
