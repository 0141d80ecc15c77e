"""SimpleFSDP gives a second model the mesh and precision of the first one of its class.

Expected: a model that is sharded without a policy computes in float32
Got: it computes in bfloat16, the policy of a model that was sharded before
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: none (only one model is sharded at a time there)
Issue: none found (searched: torchtitan simple_fsdp _wrap_class_cache second model mixed precision)
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return the dtype of the second model's weight as its forward sees it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    data_parallel(nn.Linear(4, 4), mesh, mode="fully_shard", mp_policy=policy)
    second = data_parallel(nn.Linear(4, 4), mesh, mode="fully_shard")
    return "torch.float32", str(second.weight.dtype)


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
