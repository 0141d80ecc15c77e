"""Accelerator.clip_grad_norm_ of one tensor clips nothing and returns 0.

Expected: a gradient of ones of 4 elements has the norm 2, and after clipping to 1 the norm 1
Got: norm 0, and the gradient is as before
Versions: accelerate 1.15.0, torch 2.13.0, checked 2026-11-23
Clause: clip.norm.any-iterable
Issue: introduced by https://github.com/huggingface/accelerate/pull/4219; no report found (searched: accelerate clip_grad_norm_ single tensor list(parameters))
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch import nn

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the norm, and the norm after clipping: of torch.nn.utils, and of Accelerate."""
    found = []
    for clip in (nn.utils.clip_grad_norm_, Accelerator(cpu=True).clip_grad_norm_):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        norm = clip(parameter, 1.0)  # "an iterable of Tensors or a single Tensor"
        found.append((round(norm.item(), 3), round(parameter.grad.norm().item(), 3)))
    return found[0], found[1]


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=RANKS)
        expected, got = zip(*(torch.load(f"{folder}/{r}") for r in range(RANKS)), strict=True)
    print(f"expected on each rank: {expected}\ngot:                   {got}")
    return int(expected != got)


if __name__ == "__main__":
    try:
        status = _main()  # 1: the fault is there
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
