"""Hugging Face Accelerate, behind the contract, as it trains on CPUs: DDP, clipping, loader.

    the contract       Accelerate
    ddp, ddp_bucketed  Accelerator(cpu=True).prepare_model; its DDP options by a kwargs handler
    no_sync            Accelerator.no_sync
    clip_grad_norm_    Accelerator.clip_grad_norm_
    token_loader       prepare_data_loader with a stateful loader, over a dataset of windows

Accelerate always uses the default process group, and its clipping has no `error_if_nonfinite`:
these are not offered. Each call has its own Accelerator, which refers to what it prepared; the
state of the process behind them is shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader

from spec_tests.impls.shared import replicas, whole
from spec_tests.impls.windows import Windows


def _accelerator(**options: Any) -> Accelerator:
    handlers = [DistributedDataParallelKwargs(**options)] if options else None
    # What a launcher would have said: all ranks are on this machine.
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(dist.get_world_size())):
        return Accelerator(
            cpu=True, mixed_precision="no", gradient_accumulation_steps=1, kwargs_handlers=handlers
        )


def _wrapped(module: nn.Module, *, process_group: Any, **options: Any) -> nn.Module:
    """`Accelerator.prepare_model`."""
    if process_group is not None:
        raise NotImplementedError("Accelerate takes no process_group")
    return _accelerator(**options).prepare_model(module)


ddp, ddp_bucketed = replicas(_wrapped)


def no_sync(wrapped: nn.Module) -> AbstractContextManager[None]:
    """`Accelerator.no_sync`."""
    return _accelerator().no_sync(wrapped)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`Accelerator.clip_grad_norm_`, and the value of the DTensor that it may return."""
    if error_if_nonfinite:
        raise NotImplementedError("Accelerate's clipping takes no error_if_nonfinite")
    return whole(_accelerator().clip_grad_norm_(parameters, max_norm, norm_type))


def token_loader(
    paths: Sequence[Any],
    *,
    batch_size: int,
    sequence_length: int,
    rank: int | None = None,
    world_size: int | None = None,
) -> Any:
    """A prepared stateful DataLoader: rank r of W takes every W-th batch from the r-th on."""
    _accelerator()  # else the loader would say of the process that it is alone, for good
    windows = Windows(paths, batch_size, sequence_length, rank, world_size)
    return prepare_data_loader(
        DataLoader(windows, batch_size=batch_size, drop_last=True),
        num_processes=windows.world_size,
        process_index=windows.rank,
        split_batches=False,
        dispatch_batches=False,
        even_batches=False,
        use_stateful_dataloader=True,
    )
