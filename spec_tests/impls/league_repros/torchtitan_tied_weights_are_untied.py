"""SimpleFSDP makes two parameters of one that two modules share.

Expected: the model has 1 parameter, with the sum of both gradients
Got: 2 parameters, which go apart at the first step
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.mean-gradient-of-any-model, fsdp.training.equals-full-batch-of-any-model
Issue: https://github.com/pytorch/torchtitan/issues/1524
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
    """Return the number of parameters before and after sharding."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    before = len(list(model.parameters()))
    data_parallel(model, init_device_mesh("cpu", (RANKS,)), mode="fully_shard")
    return before, len(list(model.parameters()))


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
