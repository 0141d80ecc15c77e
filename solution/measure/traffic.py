"""Traffic of a rank: every collective of a stretch of code, counted without its cooperation.

A dispatch mode sees all operators of `c10d` and `_c10d_functional`: those that Python calls, those
that PyTorch's C++ reducer launches from inside a backward, and those of DTensor. So PyTorch's
wrappers and ours are counted by the same instrument. It slows down what it watches (every operator
passes through Python): count one step, time the others.

A collective that names itself in traces (`solution.comm`) counts under that name, with PyTorch's
operators as its `calls`: gloo's way to gather rows is one broadcast per rank.

Bytes are of the payload, the larger of what an operator takes and gives: n for an all-reduce of n
bytes. On the wire a ring moves 2n(W-1)/W per rank for it.
"""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solution.comm import NAMED
from solution.measure.trace import tally

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "monitored_barrier_", "barrier")  # move no payload


class Collective(NamedTuple):
    """One operator as one rank issued it."""

    name: str  # PyTorch's: "allreduce_", "broadcast_", ...
    num_bytes: int
    dtype: torch.dtype
    asked: tuple[int, str] | None = None  # number and name of what it is part of


class Traffic(TorchDispatchMode):
    """Records the collectives issued inside the `with` block, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self.collectives: list[Collective] = []
        self._num_asked = 0
        self._asked: tuple[int, str] | None = None

    def by_kind(self, *dtypes: torch.dtype) -> dict[str, dict[str, Any]]:
        """Return `tally` of the collectives of these dtypes."""
        chosen = [one for one in self.collectives if one.dtype in dtypes]
        return tally((one.name, one.num_bytes, one.asked) for one in chosen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._opname == "_record_function_enter_new" and args[0].startswith(NAMED):
            self._num_asked += 1
            self._asked = self._num_asked, args[0].removeprefix(NAMED)
        elif func._opname == "_record_function_exit":
            self._asked = None
        if func.namespace in NAMESPACES and func._opname not in WAITS:
            # One argument is a tensor, a list or a list of lists: its tensors go together.
            tensors = [
                [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
                for argument in (*args, *(kwargs or {}).values())
            ]
            largest = max(tensors, key=_num_bytes, default=[])
            if largest:
                size, dtype = _num_bytes(largest), largest[0].dtype
                self.collectives.append(Collective(func._opname, size, dtype, self._asked))
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
