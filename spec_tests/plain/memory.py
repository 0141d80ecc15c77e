"""The peak memory of a training step, by taking one.

Problem: how much memory a model needs at a batch size, before it is trained, in terms that can be
explained: parameters, gradients, optimizer state, activations.

Idea: parameters, gradients and AdamW's two moments are arithmetic. Activations and temporaries are
measured: a dispatch mode counts each storage that an operator returns, until it is collected.

Steps
    1. Copy the model (one on the meta device gets values), take a step so that AdamW has its state.
    2. Take another one under `Books`: after the forward what is alive is the activations; the
       largest sum at any time is what the step needs above parameters and state.
    3. peak = parameters + optimizer state + that.

Use
    terms = memory_estimate(model, batch_size=2, sequence_length=8)
    terms["peak_bytes"]

Cost: a second model in memory and two steps. Nobody promised below level `production` that an
estimate takes no memory.

Source: torch.utils._python_dispatch.TorchDispatchMode.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Books(TorchDispatchMode):
    """Bytes of the storages that were made inside and are alive: now, and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.book(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def ignore(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = weakref.ref(storage)

    def book(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.now += size

        def gone(_: Any) -> None:
            self.now -= size
            self.known.pop(key)

        self.known[key] = weakref.ref(storage, gone)


def memory_estimate(model: nn.Module, *, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Return the bytes of a step by term, and the most that is alive at once."""
    sizes = (batch_size, sequence_length)
    if min(sizes) <= 0:
        raise ValueError(f"expected positive sizes, got {sizes}")
    generator = torch.get_rng_state()
    model = copy.deepcopy(model)
    if any(p.is_meta for p in model.parameters()):
        model = model.to_empty(device="cpu")
    model.zero_grad()
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained)
    ids = torch.zeros(sizes, dtype=torch.int64, device=next(model.parameters()).device)
    books = Books()

    def step() -> int:
        """Take a step; return what forward and loss left for the backward."""
        loss = F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())
        activations = books.now
        loss.backward()
        adam.step()
        adam.zero_grad()
        return activations

    step()  # from here on AdamW has its state
    books.ignore(ids, *model.parameters(), *model.buffers())
    books.ignore(*(v for state in adam.state.values() for v in state.values()))
    with books:
        activations = step()
    torch.set_rng_state(generator)
    parameters = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in trained)
    return {
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "optimizer_bytes": 2 * gradients,
        "activation_bytes": activations,
        "peak_bytes": parameters + 2 * gradients + books.most,
    }


class PlainMemory:
    """What this module offers."""

    @staticmethod
    def functions() -> dict[str, Any]:
        return {"memory_estimate": memory_estimate}
