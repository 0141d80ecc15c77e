"""Every live byte of a stretch of code, by what it is for and by phase.

    ledger = Ledger()
    ledger.own("parameters", model.parameters())
    with ledger, ledger.phase("forward", newborn="activations"):
        loss = step()
    ledger.ends["forward"]["activations"], ledger.peaks["forward"].total

A dispatch mode sees what each operator returns. A storage that is new is booked under the name that
the phase gives to newborns, and a weak reference strikes it out when the last tensor on it goes. So
views cost nothing, and what an operator returns and nobody keeps is gone at once. `own` moves
tensors to another name: what a backward returned becomes a gradient when a parameter takes it.

It works on real tensors and on fake ones (`torch._subclasses.FakeTensorMode`), which have sizes and
no memory: so a GPU that is not there, or a model that would not fit, is booked like any other.

What it does not see: scratch space inside an operator, and the allocator's rounding. PyTorch's
MemTracker has the same idea, hooks into modules and optimizers, and is private.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Ledger", "Peak"]


@dataclass(frozen=True)
class Peak:
    """The moment of a phase at which most was alive: bytes by name."""

    by_name: dict[str, int]

    @property
    def total(self) -> int:
        """All names together."""
        return sum(self.by_name.values())


class Ledger(TorchDispatchMode):
    """Books storages; see the module.

    Attributes:
        live: bytes that are alive now, by name.
        peaks: by phase, what was alive at its most.
        ends: by phase, what was alive when it was over.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.ends: dict[str, dict[str, int]] = {}
        self._total = 0
        self._highest = 0
        self._phase = ""
        self._newborn = "other"
        # Storage's address -> name, bytes, and the reference whose callback strikes it out.
        self._booked: dict[int, tuple[str, int, weakref.ref[Any]]] = {}

    @contextlib.contextmanager
    def phase(self, name: str, *, newborn: str) -> Iterator[None]:
        """Within the block, book new storages under `newborn` and keep the peak of `name`."""
        before = self._phase, self._newborn, self._highest
        self._phase, self._newborn, self._highest = name, newborn, -1
        self._note_peak()
        try:
            yield
            self.ends[name] = dict(self.live)
        finally:
            self._phase, self._newborn, self._highest = before

    def own(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Book the storages of `tensors` under `name`, wherever they stood before."""
        for tensor in tensors:
            self._book(tensor, name, moves=True)
        self._note_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._book(leaf, self._newborn, moves=False)
        self._note_peak()
        return out

    def _book(self, tensor: torch.Tensor, name: str, *, moves: bool) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        old_name, old_bytes, reference = self._booked.get(key, ("", 0, None))
        if reference is not None and not moves:
            name = old_name
        self.live[old_name] -= old_bytes
        self.live[name] += num_bytes
        self._total += num_bytes - old_bytes
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._strike_out(key))
        self._booked[key] = (name, num_bytes, reference)

    def _strike_out(self, key: int) -> None:
        name, num_bytes, _ = self._booked.pop(key)
        self.live[name] -= num_bytes
        self._total -= num_bytes

    def _note_peak(self) -> None:
        if self._phase and self._total > self._highest:
            self._highest = self._total
            self.peaks[self._phase] = Peak({n: b for n, b in self.live.items() if b})
