"""SimpleFSDP makes frozen parameters trainable.

Expected: requires_grad stays False
Got: True
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.frozen-in-a-whole-model
Issue: https://github.com/pytorch/torchtitan/issues/3885
"""

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
