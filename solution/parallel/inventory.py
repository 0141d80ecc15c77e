"""Parameters that are added to a model after it was wrapped, as LoRA adds them, or replaced.

Problem. A wrapper registers its hooks once, on Parameter objects. A Parameter that comes later, or
takes the place of another as in `load_state_dict(assign=True)`, gets the gradient of its own rank.
So each rank trains another model, and the loss falls all the same.

Idea. Keep which children and which names of parameters each module has, and which objects have
hooks. Compare before each training forward. Only where something differs are all parameters looked
at: those with hooks may be anywhere, since parametrizations and pruning move them.

Cost. About 0.5 us for each module and training forward.

PyTorch counterpart: none; its wrappers train such parameters on each rank by itself.
"""

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


class Inventory:
    """Where the parameters of a model are, to find those that are added or replaced later.

    Args:
        parts: returns the name prefix and the module of each part that a wrapper is in charge of.
        hooked: Parameters that must stay the same objects; others may be replaced.
    """

    def __init__(
        self, parts: Callable[[], Iterable[tuple[str, nn.Module]]], hooked: Iterable[Any] = ()
    ) -> None:
        self._parts, self._hooked = parts, {None, *hooked}
        self._note(list(parts()))

    def require_nothing_new(self, owner: str) -> None:
        """Compare with the parameters of now.

        Raises:
            RuntimeError: some that train were added or replaced, which nothing would reduce.
        """
        if all(_is_same(*entry) for entry in self._seen):
            return
        found = list(self._parts())
        may_change = {
            (part, name) for part, _, names, fixed in self._seen for name in names - fixed.keys()
        }
        added = [
            (f"{prefix}{name}", parameter)
            for prefix, part in found
            for name, parameter in part._parameters.items()
            if parameter not in self._hooked and (part, name) not in may_change
        ]
        # `torch.func.functional_call` puts tensors there that are no Parameters.
        trained = [(n, p) for n, p in added if isinstance(p, nn.Parameter) and p.requires_grad]
        names = [repr(name) for name, p in trained if not isinstance(p, DTensor)]
        if names:
            raise RuntimeError(
                f"{', '.join(names)} of {owner} came after it was wrapped, and each "
                "rank would train them by itself; add or replace parameters before wrapping"
            )
        if not added:  # a part was removed, or wrapped
            self._note(found)

    def _note(self, found: list[tuple[str, nn.Module]]) -> None:
        self._seen = [
            (
                part,
                dict(part._modules),
                set(part._parameters),
                {name: p for name, p in part._parameters.items() if p in self._hooked},
            )
            for _, part in found
        ]


def _is_same(part: nn.Module, children: Any, names: set[str], fixed: dict[str, Any]) -> bool:
    own = part._parameters
    is_same = part._modules == children and own.keys() == names
    return is_same and (not fixed or all(map(is_, map(own.get, fixed), fixed.values())))
