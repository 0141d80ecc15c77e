"""Lightning Fabric, behind the contract, as it trains on CPUs: DDP and clipping.

    the contract       Fabric
    flops_per_token    utilities.throughput.measure_flops
    model_flops_utilization  with the peak of utilities.throughput.get_available_flops
    ddp, ddp_bucketed  Fabric.setup_module with a DDPStrategy, which hands its options to DDP
    no_sync            Fabric.no_backward_sync
    clip_grad_norm_    Fabric.clip_gradients(max_norm=), with an optimizer of the parameters

The ranks exist already: TorchElasticEnvironment tells Fabric so. `clip_gradients` raises for a norm
that is not finite unless it is told otherwise, so `error_if_nonfinite` is always passed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities import throughput
from torch import nn

from spec_tests.impls.shared import replicas, whole


def _fabric(**options: Any) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment(), **options),
        devices=dist.get_world_size(),
        num_nodes=1,
        precision="32-true",
    )
    fabric.launch()
    return fabric


def _wrapped(module: nn.Module, **options: Any) -> nn.Module:
    """`Fabric.setup_module`; the wrapper remembers its Fabric."""
    fabric = _fabric(**options)
    wrapped = fabric.setup_module(module, move_to_device=False)
    object.__setattr__(wrapped, "_fabric", fabric)
    return wrapped


ddp, ddp_bucketed = replicas(_wrapped)


def no_sync(wrapped: Any) -> AbstractContextManager[None]:
    """`Fabric.no_backward_sync`."""
    return wrapped._fabric.no_backward_sync(wrapped, enabled=True)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`Fabric.clip_gradients`, and the value of the DTensor that it may return."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not listed:
        return torch.zeros(())
    norm = _fabric().clip_gradients(
        nn.Module(),
        torch.optim.SGD(listed, lr=0.0),
        max_norm=max_norm,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    return whole(norm)


def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """`measure_flops` of a forward and a backward of a copy on `meta`."""
    twin = copy.deepcopy(model).to("meta")
    ids = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    return throughput.measure_flops(twin, lambda: twin(ids), lambda out: out.sum()) // (
        sequence_length
    )


def model_flops_utilization(
    *, tokens_per_s: float, flops_per_token: float, device_name: str, dtype: torch.dtype
) -> float | None:
    """The rate over `get_available_flops`, which is told that the device has this name."""
    with (
        mock.patch("torch.cuda.get_device_name", return_value=device_name),
        mock.patch("lightning.fabric.accelerators.cuda._is_ampere_or_later", return_value=True),
    ):
        peak = throughput.get_available_flops(torch.device("cuda", 0), dtype)
    return None if peak is None else tokens_per_s * flops_per_token / peak
