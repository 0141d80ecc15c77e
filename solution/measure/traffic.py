"""What a rank sends: every collective of a stretch of code, counted without its cooperation.

A dispatch mode sees all operators of `c10d` and `_c10d_functional`: those that Python calls, those
that PyTorch's C++ reducer launches from inside a backward, and those of DTensor. So PyTorch's
wrappers and ours are counted by the same instrument. It slows down what it watches (every operator
passes through Python): count one step, time the others.

Bytes are of the payload, the larger of what an operator takes and gives: n for an all-reduce of n
bytes. On the wire a ring moves 2n(W-1)/W per rank for it.
"""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "monitored_barrier_", "barrier")  # move no payload


class Collective(NamedTuple):
    """One collective as one rank issued it."""

    name: str  # PyTorch's: "allreduce_", "broadcast_", ...
    num_bytes: int
    dtype: torch.dtype


class Traffic(TorchDispatchMode):
    """Records the collectives issued inside the `with` block, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self.collectives: list[Collective] = []

    def count(self, dtype: torch.dtype | None = None) -> int:
        """Return how many collectives there were, of all dtypes or of one."""
        return sum(kind["count"] for kind in self.by_kind(dtype).values())

    def num_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return their payload, of all dtypes or of one."""
        return sum(kind["bytes"] for kind in self.by_kind(dtype).values())

    def by_kind(self, dtype: torch.dtype | None = None) -> dict[str, dict[str, int]]:
        """Return PyTorch's name of a collective to its `count` and `bytes`, as they first came."""
        found: dict[str, dict[str, int]] = {}
        for one in self.collectives:
            if dtype in (None, one.dtype):
                kind = found.setdefault(one.name, {"count": 0, "bytes": 0})
                kind["count"] += 1
                kind["bytes"] += one.num_bytes
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in NAMESPACES and func._opname not in WAITS:
            # One argument is a tensor, a list or a list of lists: its tensors go together.
            tensors = [
                [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
                for argument in (*args, *(kwargs or {}).values())
            ]
            largest = max(tensors, key=_num_bytes, default=[])
            if largest:
                collective = Collective(func._opname, _num_bytes(largest), largest[0].dtype)
                self.collectives.append(collective)
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
