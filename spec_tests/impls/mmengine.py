"""OpenMMLab's MMEngine, behind the contract: its model wrapper and its sharded optimizer.

    the contract       MMEngine
    ddp, ddp_bucketed  model.MMDistributedDataParallel, with DistributedDataParallel's defaults
    no_sync            its own
    sharded_optimizer  optim.ZeroRedundancyOptimizer, which knows optimizers of torch.optim by name

`full_optimizer_state` is not offered: it consolidates on the first rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import ZeroRedundancyOptimizer
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """MMDistributedDataParallel without its debugging option."""
    return MMDistributedDataParallel(
        module, detect_anomalous_params=False, process_group=process_group
    )


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
) -> nn.Module:
    """The same with a bucket size, and gradients as views of the buckets."""
    return MMDistributedDataParallel(
        module,
        detect_anomalous_params=False,
        process_group=process_group,
        bucket_cap_mb=bucket_size_mb,
        gradient_as_bucket_view=True,
    )


def no_sync(wrapped: Any) -> AbstractContextManager[None]:
    """MMDistributedDataParallel's own context manager."""
    return wrapped.no_sync()


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """MMEngine's ZeroRedundancyOptimizer, its `.state` what this rank owns."""
    if getattr(torch.optim, optimizer_cls.__name__, None) is not optimizer_cls:
        raise NotImplementedError("MMEngine shards optimizers of torch.optim alone")
    return _Sharded(params, optimizer_cls.__name__, process_group=process_group, **kwargs)


class _Sharded(ZeroRedundancyOptimizer):  # type: ignore[misc]  # Any where it is not installed
    """ZeroRedundancyOptimizer whose `.state` is what this rank owns; its own is for show."""

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        """Whatever it keeps for show."""
