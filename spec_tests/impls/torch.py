"""PyTorch's own wrappers, behind the contract: a peer that is judged like anyone else.

`ddp` is DistributedDataParallel as it comes; `ddp_bucketed` is the same with the bucket size given
and with gradients as views of the buckets. `fully_shard` is FSDP2 as it comes, `fsdp` the same with
every Linear and Embedding a unit. `sharded_optimizer` is ZeroRedundancyOptimizer. Known deviations
are declared in torch.toml.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard_in_place
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """DistributedDataParallel with its defaults."""
    return DistributedDataParallel(module, process_group=process_group)


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
) -> nn.Module:
    """DistributedDataParallel with the given bucket size and gradients as bucket views."""
    return DistributedDataParallel(
        module,
        process_group=process_group,
        bucket_cap_mb=bucket_size_mb,
        gradient_as_bucket_view=True,
    )


def no_sync(wrapped: DistributedDataParallel) -> AbstractContextManager[None]:
    """DistributedDataParallel's own context manager."""
    return wrapped.no_sync()


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """FSDP2."""
    fully_shard_in_place(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
    )
    return module


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 on every Linear and Embedding that shares nothing, and on the model."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    uses = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and uses[id(layer.weight)] == 1:
            fully_shard(layer, mp_policy=policy)
    return module if isinstance(module, FSDPModule) else fully_shard(module, mp_policy=policy)


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """`full_tensor()` of every parameter; a root that a forward left unsharded is resharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    named: dict[str, Any] = dict(model.named_parameters())
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in named.items()
    }


__all__ = [
    "MixedPrecisionPolicy",
    "ddp",
    "ddp_bucketed",
    "fsdp",
    "full_parameters",
    "fully_shard",
    "no_sync",
]


class _Sharded(ZeroRedundancyOptimizer):
    """ZeroRedundancyOptimizer whose `.state` is what this rank owns.

    PyTorch's keeps that in an inner optimizer, and an empty one of its own for show.
    """

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        """Whatever it keeps for show."""


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> ZeroRedundancyOptimizer:
    """ZeroRedundancyOptimizer with its defaults."""
    return _Sharded(params, optimizer_class=optimizer_cls, process_group=process_group, **kwargs)


def full_optimizer_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Its own consolidation, once towards each rank; the next one drops what it collected."""
    state: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank(optimizer.process_group):
            state = optimizer.state_dict()
    return state


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, and the value of the DTensor that it may return."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
