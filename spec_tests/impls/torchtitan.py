"""torchtitan, behind the contract: SimpleFSDP for whole models, and its clipping.

    the contract     torchtitan
    fsdp             experiments.graph_trainer.simple_fsdp.data_parallel(mode="fully_shard")
    clip_grad_norm_  distributed.utils.clip_grad_norm_
    model_flops_utilization  with the peak of tools.utils.get_peak_flops

torchtitan's trainer divides the loss by the tokens of all ranks, so SimpleFSDP sums gradients over
ranks. A hook on each parameter divides each gradient by the number of ranks before it is added up.

SimpleFSDP keeps what it made of a class of modules for the life of the process, with the mesh and
the precision of the first model. Ranks serve many cases: the cache is emptied where no earlier
model is alive, as a new process would have it. Models that live at the same time share it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import utils
from torchtitan.experiments.graph_trainer import simple_fsdp
from torchtitan.tools.utils import get_peak_flops

_ALIVE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """`data_parallel` of the whole model over all ranks, in place."""
    size = dist.get_world_size()
    gc.collect()
    if not _ALIVE:
        simple_fsdp._wrap_class_cache.clear()
    _ALIVE.add(module)
    simple_fsdp.data_parallel(
        module,
        init_device_mesh("cpu", (size,)),
        mode="fully_shard",
        mp_policy=simple_fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=None),
        shard_dim=0,
    )
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / size)
    return module


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """torchtitan's clipping without a pipeline and without experts."""
    return utils.clip_grad_norm_(
        parameters,
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        foreach=None,
        pp_mesh=None,
        ep_enabled=False,
    )


def model_flops_utilization(
    *, tokens_per_s: float, flops_per_token: float, device_name: str, dtype: torch.dtype
) -> float | None:
    """The rate over `get_peak_flops`, which knows products of bfloat16 alone."""
    if dtype is not torch.bfloat16:
        raise NotImplementedError("torchtitan knows the peak of bfloat16 alone")
    return tokens_per_s * flops_per_token / get_peak_flops(device_name)
