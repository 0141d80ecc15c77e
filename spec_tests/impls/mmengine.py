"""OpenMMLab's MMEngine, behind the contract: its model wrapper and its sharded optimizer.

    the contract       MMEngine
    ddp, ddp_bucketed  model.MMDistributedDataParallel, with DistributedDataParallel's defaults
    no_sync            its own
    sharded_optimizer  optim.ZeroRedundancyOptimizer, which knows optimizers of torch.optim by name

`full_optimizer_state` is not offered: it consolidates on the first rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import ZeroRedundancyOptimizer
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from spec_tests.impls.shared import VisibleState, no_sync, replicas

ddp, ddp_bucketed = replicas(partial(MMDistributedDataParallel, detect_anomalous_params=False))


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


class _Sharded(VisibleState, ZeroRedundancyOptimizer):  # type: ignore[misc]  # Any if not installed
    """ZeroRedundancyOptimizer whose `.state` is what this rank owns."""


__all__ = ["ddp", "ddp_bucketed", "no_sync", "sharded_optimizer"]
