"""ZeRO-2 mixes up gradients that become ready in another order on each rank, without an error.

Expected: weights a and b, with gradients 1 and 3 on both ranks, are 0 and -2 after a step
Got: both -1: the gradients of a and b are averaged with each other
Versions: deepspeed 0.19.8, torch 2.13.0, checked 2026-11-24
Clause: trainer.parameters.order-differs
Issue: https://github.com/deepspeedai/DeepSpeed/issues/2343 tells of branches
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

ZERO = {"stage": 2}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
CONFIG |= {"zero_optimization": ZERO, "zero_allow_untested_optimizer": True, "gradient_clipping": 0}
EXPECTED = [0.0, -2.0]


def observe(rank: int) -> list[float]:
    """Return both weights after a step; rank 1 computes b first."""
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    for layer in model.values():
        nn.init.ones_(layer.weight)
    order = ["ab", "ba"][rank]
    model.forward = lambda x: sum({"a": 1, "b": 3}[name] * model[name](x) for name in order)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=CONFIG)
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    return [safe_get_full_fp32_param(p).item() for p in model.parameters()]


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=2)
        got = [torch.load(f"{folder}/{rank}") for rank in range(2)]
    print(f"expected on each rank: {EXPECTED}\ngot:                   {got}")
    sys.exit(int(got != [EXPECTED] * 2))
