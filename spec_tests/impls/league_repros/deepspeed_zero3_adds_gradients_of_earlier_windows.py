"""ZeRO-3 adds gradients of earlier windows where the first micro-batch does not use a parameter.

Expected: weight b, used in the second of two micro-batches, moves by 0.5 in each of three steps
Got: by 0.5, 1.0 and 1.5
Versions: deepspeed 0.19.8, torch 2.13.0, checked 2026-11-23
Clause: trainer.parameters.unused-in-a-micro-batch
Issue: none found (searched: DeepSpeed ZeRO-3 gradient accumulation unused first micro-batch stale gradient partition)
"""

import os
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", LOCAL_SIZE="2")

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

ZERO = {"stage": 3, "reduce_bucket_size": 512, "stage3_param_persistence_threshold": 0}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
CONFIG |= {"zero_optimization": ZERO, "zero_allow_untested_optimizer": True, "gradient_clipping": 0}
EXPECTED = [0.5, 0.0, -0.5]


def observe() -> list[float]:
    """Return weight b after each of three steps."""
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    for layer in model.values():
        nn.init.ones_(layer.weight)
    model.forward = lambda x, use: sum(model[name](x) for name in use)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=CONFIG)
    found = []
    for _ in range(3):
        for use in ("a", "ab"):
            engine.backward(engine(torch.ones(1, 1), use).sum())
            engine.step()
        found.append(safe_get_full_fp32_param(model["b"].weight).item())
    return found


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(observe(), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=2)
        got = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    print(f"expected on each rank: {EXPECTED}\ngot:                   {got}")
    sys.exit(int(got != [EXPECTED] * 2))
