"""FairScale, behind the contract: OSS as sharded optimizer, ShardedDataParallel as replicas.

    the contract          FairScale
    sharded_optimizer     optim.OSS
    full_optimizer_state  OSS.state_dict(all_ranks=True)
    ddp                   nn.ShardedDataParallel over an OSS of SGD, which says who owns what
    ddp_bucketed          the same with `reduce_buffer_size`, in elements of float32
    no_sync               ShardedDataParallel.no_sync

ShardedDataParallel reduces each gradient to the rank that owns the parameter. So that every rank
can be asked for it, `finish_gradient_synchronization` broadcasts it from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Optimizer

from spec_tests.impls.shared import VisibleState, no_sync


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Optimizer:
    """OSS with full precision in its broadcasts, its `.state` what this rank owns."""
    return _Sharded(
        params,
        optim=optimizer_cls,
        group=process_group,
        broadcast_fp16=False,
        force_broadcast_object=False,
        **kwargs,
    )


class _Sharded(VisibleState, OSS):  # type: ignore[misc]  # Any where fairscale is not installed
    """OSS whose `.state` is what this rank owns."""


def full_optimizer_state(optimizer: OSS) -> dict[str, Any]:
    """OSS's own consolidation, on every rank; the copy is dropped afterwards."""
    state = optimizer.state_dict(all_ranks=True)
    optimizer._all_states = []
    return state


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """ShardedDataParallel with its defaults."""
    return _replicas(module, process_group, reduce_buffer_size=2**23)


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
) -> nn.Module:
    """The same, the most elements of a bucket given."""
    return _replicas(module, process_group, reduce_buffer_size=int(bucket_size_mb * 2**18))


def _replicas(module: nn.Module, group: ProcessGroup | None, *, reduce_buffer_size: int) -> Any:
    return ShardedDataParallel(
        module,
        OSS(module.parameters(), optim=SGD, group=group, lr=0.0),
        process_group=group,
        broadcast_buffers=True,
        sync_models_at_startup=True,
        reduce_buffer_size=reduce_buffer_size,
        auto_refresh_trainable=True,
        reduce_fp16=False,
        warn_on_trainable_params_changed=False,
    )


@torch.no_grad()
def finish_gradient_synchronization(wrapped: Any) -> None:
    """Broadcast each gradient from the rank that owns the parameter, if it has one there."""
    group = wrapped._process_group
    [optimizer] = wrapped._sharded_optimizers
    for parameter in wrapped.parameters():
        if not parameter.requires_grad:
            continue
        owner = optimizer._param_to_rank[parameter]
        has_one = torch.tensor(int(parameter.grad is not None))
        dist.broadcast(has_one, group=group, group_src=owner)
        if not has_one:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.broadcast(parameter.grad, group=group, group_src=owner)


__all__ = [
    "ddp",
    "ddp_bucketed",
    "finish_gradient_synchronization",
    "full_optimizer_state",
    "no_sync",
    "sharded_optimizer",
]
