"""SimpleFSDP makes two parameters of one that two modules share.

Expected: the model has 1 parameter, with the sum of both gradients
Got: 2 parameters, which go apart at the first step
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: fsdp.backward.mean-gradient-of-any-model, fsdp.training.equals-full-batch-of-any-model
Issue: https://github.com/pytorch/torchtitan/issues/1524
"""

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
