"""What a rank holds at the update, by component, and what a forward leaves for its backward.

    with Holdings(model, optimizer) as holdings:
        next(steps)
    holdings.num_bytes      # by name: parameters, gradients, optimizer, activations

Bytes, each storage counted once whoever shares it. Parameters, gradients and optimizer state are
looked at between the last reduction and the update: of a sharded model that is this rank's part.
Activations are what autograd saves in one micro-batch, parameters excluded; the largest one counts.
It slows down what it watches, so watch one step and time the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Holdings", "watched"]


class Holdings:
    """Looks on while a step is taken.

    Args:
        model: what is called with each micro-batch; wrapped or not.
        optimizer: what updates it; its state is looked at before the update.

    Attributes:
        num_bytes: by component; empty before the first update.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.num_bytes: dict[str, int] = {}
        self._model, self._optimizer = model, optimizer
        self._saved: dict[int, int] = {}  # storage's address -> bytes, of this micro-batch
        self._most_saved = 0

    def __enter__(self) -> Self:
        self._handles: list[Any] = [
            self._model.register_forward_pre_hook(lambda *_: self._saved.clear()),
            self._optimizer.register_step_pre_hook(lambda *_: self._look()),
        ]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in {_address(p) for p in self._model.parameters()}:
            self._saved[storage.data_ptr()] = storage.nbytes()
            self._most_saved = max(self._most_saved, sum(self._saved.values()))
        return tensor

    def _look(self) -> None:
        parameters = list(self._model.parameters())
        state = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        self.num_bytes = {
            "parameters": _num_bytes(parameters),
            "gradients": _num_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": _num_bytes(state),
            "activations": self._most_saved,
        }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: torch.Tensor) -> int:
    return _local(tensor.detach()).untyped_storage().data_ptr()


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements, each storage's part once: shards are views into flat buffers."""
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        local = _local(tensor.detach())
        seen[local.data_ptr(), local.numel()] = local.numel() * local.element_size()
    return sum(seen.values())


@contextmanager
def watched(*instruments: AbstractContextManager[Any]) -> Iterator[None]:
    """Several instruments over one stretch of code."""
    with ExitStack() as stack:
        for instrument in instruments:
            stack.enter_context(instrument)
        yield
