"""A whole model in one call: the shape in which the CS336 exercise asks for FSDP.

1. Every Linear and Embedding becomes a unit of its own, everything else (norms) one more.
2. With `compute_dtype` those layers are gathered in it and compute in it; the shards, the gradients
   that the optimizer sees, and whatever is neither, keep their own dtype.

PyTorch counterpart: none; a loop over `fully_shard`.
"""

from __future__ import annotations

from collections import Counter
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


class FullySharded(nn.Module):
    """A sharded model behind the protocol of the data-parallel wrappers.

    Attributes:
        module: the model, sharded in place.
    """

    def __init__(self, module: nn.Module, *, process_group: comm.Group = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients stay on this rank."""
        assert isinstance(self.module, FSDPModule)
        with self.module.no_sync():
            yield

    def finish_gradient_synchronization(self) -> None:
        """Gradients are means when backward returns: nothing is left to do."""


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> FullySharded:
    """Shard the weights of all Linear and Embedding layers of `module`, and the rest as one unit.

    Layers are known by the name of their class or of one it derives from, so also those that an
    exercise defines itself. Layers that share a parameter stay with the rest, and so do those
    inside of an `nn.MultiheadAttention`, which reads their weights without calling them. A layer of
    which something else does so, as in `x @ embedding.weight.T`, needs `fully_shard` around both.

    Raises:
        ValueError, NotImplementedError: see `fully_shard`.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    uses = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    read_from_outside = {
        part
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)
        for part in attention.modules()
    }
    for layer in module.modules():
        if layer in read_from_outside:
            continue
        own = [p for p in layer.parameters() if p is not None]
        if layer is not module and _is_layer(layer) and all(uses[id(p)] == 1 for p in own):
            fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy if _is_layer(module) else None)
    return FullySharded(module)


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
