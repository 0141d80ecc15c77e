"""Gradients that a script sums over the ranks by hand: their norms before and after.

A step that is given these sums as `all_reduce` left them is given as many times the mean as there
are ranks. Each norm is a pass over the gradients, so that they are taken for one step alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .guard import quiet
from .layout import is_dtensor

_NAMES = ("tensor", "op", "group", "async_op")
_CLOSE = 1e-3  # of a norm: half of it, or twice, is far


class Sums:
    """What backwards left in the gradients of one window, and what `all_reduce` made of it."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._summed: list[tuple[int, Tensor, Tensor]] = []

    def made(self, probe: Any, parameter: Tensor) -> None:
        """A backward has added to a gradient."""
        is_by_hand = id(parameter) not in probe.names.ddp
        grad = parameter.grad if is_by_hand and _is_due(probe) else None
        if grad is not None and grad.layout is torch.strided:
            self._made[id(parameter)] = (grad.numel(), _norm(grad))

    def summed(self, size: int, before: Tensor, after: Tensor) -> None:
        """Keep the norm of a tensor and of its sum over the ranks."""
        self._summed.append((size, before, after))

    def norm(self, parameters: list[Tensor]) -> float | None:
        """Return the norm of the sums, if they are of all gradients as the backwards left them."""
        own = [self._made[id(p)] for p in parameters if id(p) in self._made]
        least = 1 if any(size == 1 for size, _ in own) else 2  # a loss to be shown is no gradient
        summed = [each for each in self._summed if each[0] >= least]
        if not own or sum(size for size, _ in own) != sum(size for size, _, _ in summed):
            return None
        columns = ([n for _, n in own], [n for _, n, _ in summed], [n for _, _, n in summed])
        made, before, after = (math.hypot(*map(float, each)) for each in columns)
        return after if abs(before - made) < _CLOSE * made else None


def _is_due(probe: Any) -> bool:
    """Return whether an optimizer's next step is the one that is looked at."""
    due = (probe.options["replay"] or 2) - 1
    steps = [each.steps for each in probe.optimizers.values()] or [0]
    return dist.is_initialized() and dist.get_world_size() > 1 and due in steps


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def all_reduce(original: Any, *arguments: Any, **keywords: Any) -> Any:
    """Reduce a tensor, and keep its norms if it is summed at once."""
    given = dict(zip(_NAMES, arguments, strict=False)) | keywords
    norms: list[Tensor] = []
    quiet(_take)(given, norms)
    result = original(*arguments, **keywords)
    if norms:
        quiet(_take)(given, norms)
        quiet(_keep)(given["tensor"], norms)
    return result


def _take(probe: Any, given: dict[str, Any], norms: list[Tensor]) -> None:
    tensor = given.get("tensor")
    if not _is_due(probe) or not isinstance(tensor, Tensor) or is_dtensor(tensor):
        return
    is_sum = given.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM and not given.get("async_op")
    is_whole = dist.get_world_size(given.get("group")) == dist.get_world_size()
    if is_sum and is_whole and tensor.is_floating_point():
        norms.append(_norm(tensor))


def _keep(probe: Any, tensor: Tensor, norms: list[Tensor]) -> None:
    probe.window.sums.summed(tensor.numel(), *norms)
