"""SimpleFSDP makes frozen parameters trainable.

Expected: requires_grad stays False
Got: True
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.frozen-in-a-whole-model
Issue: https://github.com/pytorch/torchtitan/issues/3885
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return requires_grad before and after sharding."""
    model = nn.Linear(4, 4).requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    data_parallel(model, init_device_mesh("cpu", (RANKS,)), mode="fully_shard")
    return before, [p.requires_grad for p in model.parameters()]


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
