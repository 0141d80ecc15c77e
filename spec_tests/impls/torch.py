"""PyTorch's own wrappers, behind the contract: a peer that is judged like anyone else.

`ddp` is DistributedDataParallel as it comes; `ddp_bucketed` is the same with the bucket size given
and with gradients as views of the buckets. Its known deviations are declared in torch.toml.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


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
