"""PyTorch-Ignite, behind the contract: `auto_model`, which wraps in DistributedDataParallel.

Ignite finds the process group that there is; options of DistributedDataParallel are handed on. It
has no name for `no_sync`: that of the wrapper is what its documentation uses for accumulation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import ignite.distributed as idist
from torch import nn
from torch.distributed import ProcessGroup


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """`auto_model` with the options that DistributedDataParallel has by default."""
    idist.sync()
    return idist.auto_model(module, sync_bn=False, process_group=process_group)


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
) -> nn.Module:
    """The same with a bucket size, and gradients as views of the buckets."""
    idist.sync()
    return idist.auto_model(
        module,
        sync_bn=False,
        process_group=process_group,
        bucket_cap_mb=bucket_size_mb,
        gradient_as_bucket_view=True,
    )


def no_sync(wrapped: Any) -> AbstractContextManager[None]:
    """The wrapper's own context manager."""
    return wrapped.no_sync()
