"""Parameters that are added to a model after it was wrapped, as LoRA adds them.

Problem. A wrapper registers its hooks once. A parameter that comes later gets the gradient of its
own rank, so each rank trains another model, and the loss falls all the same.

Idea. Keep which children and which names of parameters each module has, and compare before each
training forward. Only where they differ are all parameters looked at.

Cost. About 0.3 us for each module and training forward.

PyTorch counterpart: none; its wrappers train such parameters on each rank by itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


class Inventory:
    """Where the parameters of a model are, to find those that are added later.

    Args:
        parts: returns the name prefix and the module of each part that a wrapper is in charge of.
    """

    def __init__(self, parts: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._parts = parts
        self._note(list(parts()))

    def require_nothing_new(self, owner: str) -> None:
        """Compare with the parameters of now.

        Raises:
            RuntimeError: some that train were added, which nothing would reduce.
        """
        if all(_is_same(*entry) for entry in self._seen):
            return
        found = list(self._parts())
        known = {(part, name) for part, _, names, _ in self._seen for name in names}
        known -= {(part, name) for part, _, _, absent in self._seen for name in absent}
        added = [
            (f"{prefix}{name}", parameter)
            for prefix, part in found
            for name, parameter in part._parameters.items()
            if parameter is not None and (part, name) not in known
        ]
        names = [n for n, p in added if p.requires_grad and not isinstance(p, DTensor)]
        if names:
            raise RuntimeError(
                f"{', '.join(map(repr, names))} of {owner} came after it was wrapped, and each "
                "rank would train them by itself; add parameters before wrapping"
            )
        if not added:  # a part was removed, or wrapped
            self._note(found)

    def _note(self, found: list[tuple[str, nn.Module]]) -> None:
        self._seen = [
            (
                part,
                dict(part._modules),
                set(part._parameters),
                [name for name, parameter in part._parameters.items() if parameter is None],
            )
            for _, part in found
        ]


def _is_same(part: nn.Module, children: dict[str, Any], names: set[str], absent: list[str]) -> bool:
    own = part._parameters
    is_same = part._modules == children and own.keys() == names
    return is_same and not (absent and any(own[name] is not None for name in absent))
