"""The uses that a forward makes of its weights; in a wrong world one alone has a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def forward_that_counts(
    forward: Callable[[], Tensor], weights: Iterable[Tensor], use: int | None
) -> Tensor:
    """Return the output of a forward in which all uses of each weight but one are detached.

    Args:
        use: 0 for the first use of each, -1 for the last; None detaches nothing.
    """
    if use is None:
        return forward()
    known = list(weights)
    with _Uses(known) as every:
        forward()
    with _Uses(known, {of: use % number for of, number in every.seen.items()}):
        return forward()


class _Uses(TorchFunctionMode):
    def __init__(self, weights: list[Tensor], kept: dict[int, int] | None = None) -> None:
        super().__init__()
        self._weights, self._kept = {id(weight) for weight in weights}, kept
        self.seen: Counter[int] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {name: self._use(value) for name, value in (kwargs or {}).items()}
        return function(*map(self._use, args), **given)

    def _use(self, value: Any) -> Any:
        if id(value) not in self._weights:
            return value
        self.seen[id(value)] += 1
        is_kept = self._kept is None or self.seen[id(value)] - 1 == self._kept[id(value)]
        return value if is_kept else value.detach()
