"""SimpleFSDP gives a second model the mesh and precision of the first one of its class.

Expected: a model that is sharded without a policy computes in float32
Got: it computes in bfloat16, the policy of a model that was sharded before
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: none (only one model is sharded at a time there)
Issue: none found (searched: torchtitan simple_fsdp _wrap_class_cache second model mixed precision)
"""

import torch
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
