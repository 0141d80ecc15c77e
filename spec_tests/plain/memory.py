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
    terms = PlainMemory(model, batch_size=2, sequence_length=8).estimate()
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
        self.now = self.most = self.made = 0
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
        self.made += size

        def gone(_: Any) -> None:
            self.now -= size
            self.known.pop(key)

        self.known[key] = weakref.ref(storage, gone)


class PlainMemory:
    """One estimate."""

    def __init__(self, model: nn.Module, batch_size: int, sequence_length: int) -> None:
        self.check(batch_size, sequence_length)
        self.original = model
        self.model = self.copied(model)
        self.batch_size, self.sequence_length = batch_size, sequence_length

    def check(self, *sizes: int) -> None:
        if min(sizes) <= 0:
            raise ValueError(f"expected positive sizes, got {sizes}")

    def copied(self, model: nn.Module) -> nn.Module:
        twin = copy.deepcopy(model)
        for module in (model, twin):
            if any(p.is_meta for p in module.parameters()):
                return twin.to_empty(device="cpu")
        return twin

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    # ------------------------------------------------------------------------------- the terms

    def parameters(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    def gradients(self) -> int:
        return sum(p.nbytes for p in self.trained())

    def optimizer(self) -> int:
        return 2 * self.gradients()

    def estimate(self) -> dict[str, int]:
        activations, above = self.step()
        terms = {
            "parameter_bytes": self.parameters(),
            "gradient_bytes": self.gradients(),
            "optimizer_bytes": self.optimizer(),
            "activation_bytes": activations,
        }
        return {**terms, "peak_bytes": self.peak(terms, above)}

    def peak(self, terms: dict[str, int], above: int) -> int:
        return terms["parameter_bytes"] + terms["optimizer_bytes"] + above

    # -------------------------------------------------------------------------------- the step

    def step(self) -> tuple[int, int]:
        """Activations, and the most above what is there between steps."""
        state = torch.get_rng_state()
        for p in self.model.parameters():
            p.grad = None
        adam = torch.optim.AdamW(self.trained())
        ids = self.ids()
        self.loss(ids).backward()
        adam.step()
        adam.zero_grad()
        books = Books()
        books.ignore(ids, *self.model.parameters(), *self.model.buffers())
        books.ignore(*(v for s in adam.state.values() for v in s.values()))
        with books:
            loss = self.loss(ids)
            activations = self.activations(books)
            loss.backward()
            adam.step()
            adam.zero_grad()
        torch.set_rng_state(state)
        return activations, books.most

    def ids(self) -> torch.Tensor:
        device = next(self.model.parameters()).device
        return torch.zeros(self.batch_size, self.sequence_length, dtype=torch.int64, device=device)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, -2), ids.flatten())

    def activations(self, books: Books) -> int:
        return books.now

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""

        def memory_estimate(model, *, batch_size, sequence_length):
            return cls(model, batch_size, sequence_length).estimate()

        return {"memory_estimate": memory_estimate}
