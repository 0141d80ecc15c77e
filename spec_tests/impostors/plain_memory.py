"""A plain, right estimate of memory with every decision in a method of its own.

It takes a real step with a copy of the model and books storages as operators return them. The
near-misses of the measure chapter override one decision. It is itself a benign variant: nobody
promised below level `production` that an estimate takes no memory.
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

from spec_tests.impostors.card import Functions, Impostor


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


def offer(kind: type[PlainMemory]) -> Functions:
    """The contract function of that estimate."""

    def memory_estimate(
        model: nn.Module, *, batch_size: int, sequence_length: int
    ) -> dict[str, int]:
        return kind(model, batch_size, sequence_length).estimate()

    return {"memory_estimate": memory_estimate}


def card(
    kind: type[PlainMemory], words: str, does: str, seen: str, unseen: str, *rejected_by: str
) -> Impostor:
    """A near-miss; it names clauses without their first two words."""
    names = tuple(f"measure.memory.{name}" for name in rejected_by)
    return Impostor(f"measure.{words}", does, seen, unseen, names, functions=lambda: offer(kind))
