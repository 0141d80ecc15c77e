"""What adapters of several libraries share: options of DistributedDataParallel, a visible state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup


def replicas(wrap: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `ddp` and `ddp_bucketed` of a library that builds on DistributedDataParallel.

    Args:
        wrap: takes a module, and options of DistributedDataParallel by name.
    """

    def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
        """Wrap with the options that DistributedDataParallel has by default."""
        return wrap(module, process_group=process_group)

    def ddp_bucketed(
        module: nn.Module, *, bucket_size_mb: float, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Wrap with a bucket size, and gradients as views of the buckets."""
        options = {"bucket_cap_mb": bucket_size_mb, "gradient_as_bucket_view": True}
        return wrap(module, process_group=process_group, **options)

    return ddp, ddp_bucketed


def no_sync(wrapped: Any) -> AbstractContextManager[None]:
    """The wrapper's own context manager."""
    return wrapped.no_sync()


class VisibleState:
    """Before an optimizer that keeps its state in an inner one, `optim`: shows that as `.state`.

    Its own is empty, for show, or empty until a load. Before its constructor has made the inner
    optimizer, it sees what it set itself.
    """

    optim: torch.optim.Optimizer
    _shown: Any = None

    @property
    def state(self) -> Any:
        """The inner optimizer's, which is what this rank owns."""
        return self.optim.state if hasattr(self, "optim") else self._shown

    @state.setter
    def state(self, value: Any) -> None:
        self._shown = value


def whole(norm: Any) -> torch.Tensor:
    """Return the value of a norm that may be a DTensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class LoopTrainer(ABC):
    """What trainers of the contract share that own a `model`, `optimizer` and `rates`."""

    model: Any
    optimizer: torch.optim.Optimizer
    rates: list[float]
    accumulation: int

    def check(self, micro_batches: Any) -> None:
        """Refuse another number of micro-batches than the trainer was built for."""
        if len(micro_batches) != self.accumulation:
            raise ValueError(f"expected {self.accumulation}, got {len(micro_batches)}")

    @abstractmethod
    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return the loss in evaluation mode, without gradients."""
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return self.forward(batch)
        finally:
            for part, is_training in modes:
                part.training = is_training

    def set_lr(self, factor: float) -> None:
        """As a scheduler does."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
