"""TorchTNT, behind the contract: `prepare_ddp` with a DDPStrategy.

Its dataclass hands the options of DistributedDataParallel on; `no_sync` is that of the wrapper, as
in its AutoUnit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torchtnt.utils.prepare_module import DDPStrategy, prepare_ddp


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """`prepare_ddp` with the options that DistributedDataParallel has by default."""
    return prepare_ddp(module, torch.device("cpu"), DDPStrategy(process_group=process_group))


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: Any, process_group: ProcessGroup | None = None
) -> nn.Module:
    """The same with a bucket size, and gradients as views of the buckets."""
    strategy = DDPStrategy(
        process_group=process_group, bucket_cap_mb=bucket_size_mb, gradient_as_bucket_view=True
    )
    return prepare_ddp(module, torch.device("cpu"), strategy)


def no_sync(wrapped: Any) -> AbstractContextManager[None]:
    """The wrapper's own context manager."""
    return wrapped.no_sync()
