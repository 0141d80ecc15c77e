"""A whole model in one call: the shape in which the CS336 exercise asks for FSDP.

1. Every Linear and Embedding becomes a unit of its own; layers that share a weight are one unit.
2. Everything else (norms) stays a plain parameter on every rank: too small to be worth a message
   in forward. Its gradient is averaged as in `ddp.py`, overlapping with backward.
3. With `compute_dtype` the units are gathered in it and compute in it; the shards, the gradients
   that the optimizer sees, and whatever is replicated, keep their own dtype.

PyTorch counterpart: none; a loop over `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution import comm
from solution.parallel.fsdp.api import fully_shard
from solution.parallel.fsdp.module import FSDPModule
from solution.parallel.fsdp.policy import MixedPrecisionPolicy
from solution.parallel.reducer import InPlace, is_inside_backward


class FullySharded(nn.Module):
    """A sharded model behind the protocol of the data-parallel wrappers.

    Attributes:
        module: the model, sharded in place.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, *, process_group: comm.Group = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self._reducer = InPlace(
            [
                (name, parameter)
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and not isinstance(parameter, DTensor)
            ],
            process_group,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        if torch.is_grad_enabled() and not is_inside_backward():
            self._reducer.begin()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients stay on this rank."""
        assert isinstance(self.module, FSDPModule)
        previous = self._reducer.is_sending
        self._reducer.is_sending = False
        try:
            with self.module.no_sync():
                yield
        finally:
            self._reducer.is_sending = previous

    def finish_gradient_synchronization(self) -> None:
        """Wait for the means of replicated gradients; those of shards are complete already.

        Called once after every backward outside `no_sync`, before the optimizer.
        """
        self._reducer.finish()


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> FullySharded:
    """Shard the Linear and Embedding layers of `module`; the rest stays plain and replicated.

    Layers are known by the name of their class or of one it derives from, so also those that an
    exercise defines itself. What stays replicated with the rest: a layer that shares a parameter
    with a module of another kind, and those inside of an `nn.MultiheadAttention`, which reads their
    weights without calling them. A layer of which something else does so, as in
    `x @ embedding.weight.T`, needs `fully_shard` around both.

    Values are not synchronised: seed all ranks alike.

    Raises:
        ValueError, NotImplementedError: see `fully_shard`.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    for layers in _units(module):
        fully_shard(layers, mp_policy=policy)
    if not isinstance(module, FSDPModule):
        # A unit of nothing: it puts the others under one schedule.
        rest = {p for p in module.parameters() if not isinstance(p, DTensor)}
        fully_shard(module, ignored_params=rest)
    return FullySharded(module)


def _units(module: nn.Module) -> list[list[nn.Module]]:
    """The layers to shard, those that share a parameter together."""
    read_from_outside = {
        part
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)
        for part in attention.modules()
    }
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, []).append(part)
    units: dict[nn.Module, list[nn.Module]] = {}
    for layer in module.modules():
        found = [part for p in layer.parameters() for part in users[p]]
        together = list(dict.fromkeys([layer, *found]))  # in one order on all ranks
        may_be_sharded = all(map(_is_layer, together)) and read_from_outside.isdisjoint(together)
        if found and layer not in units and may_be_sharded:
            units |= dict.fromkeys(together, together)
    return list({id(layers): layers for layers in units.values()}.values())


def _is_layer(module: nn.Module) -> bool:
    return any(base.__name__ in ("Linear", "Embedding") for base in type(module).__mro__)


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """`{name of the bare model: full tensor}`, copies, on every rank; all ranks call it."""
    model = model.module if isinstance(model, FullySharded) else model
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
