"""A minimal implementation, typed: a type checker holds it against the contract's signatures.

Nothing runs this file. It shows that the contract's signatures accept what a user would write,
and `make lint` fails when they no longer do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests import contract

P = ParamSpec("P")
R = TypeVar("R")


def ddp(module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """A replica; the finish below averages."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, group=process_group, group_src=0)
    return module


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """A subclass of Module is a Module."""
    return DistributedDataParallel(
        module, process_group=process_group, bucket_cap_mb=bucket_size_mb
    )


def no_sync(wrapped: nn.Module) -> AbstractContextManager[None]:
    """A context manager of any kind."""
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped.no_sync()


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Average what there is."""
    for parameter in wrapped.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Exact division."""
    steps, rest = divmod(global_batch_size, micro_batch_size * world_size)
    if rest:
        raise ValueError("global_batch_size does not divide")
    return steps


class Promise(Generic[P, R]):
    """A function of the contract, to which a type checker holds others."""

    def __init__(self, function: Callable[P, R]) -> None:
        """`function` fixes the signature."""

    def kept_by(self, own: Callable[P, R]) -> None:
        """Accepted by a type checker if `own` can be called as promised."""


Promise(contract.parallel.ddp).kept_by(ddp)
Promise(contract.parallel.ddp_bucketed).kept_by(ddp_bucketed)
Promise(contract.parallel.no_sync).kept_by(no_sync)
Promise(contract.parallel.finish_gradient_synchronization).kept_by(finish_gradient_synchronization)
Promise(contract.training.accumulation_steps).kept_by(accumulation_steps)
