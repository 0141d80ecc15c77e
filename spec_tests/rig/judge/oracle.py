"""What is right: one process, the whole batch, exact integers, no tricks.

The oracle runs in the parent. It never touches an implementation, and an implementation never
sees it. Each function below is a few lines of plain PyTorch, because it is the one thing that
nothing else checks. What was computed is kept: the same question comes once per function that is
judged, per schedule and per world, and the answer depends on none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from spec_tests.rig.ranks import wire
from spec_tests.rig.toys import TOYS, sum_of_squares

Named = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]

_T = TypeVar("_T")
_MAX_KEPT = 512
_kept: dict[Any, Any] = {}


def once(key: Any, compute: Callable[[], _T]) -> _T:
    """The answer under this key, computed if it is not kept. Whoever gets it changes nothing."""
    if key not in _kept:
        while len(_kept) >= _MAX_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = compute()
    kept: _T = _kept[key]
    return kept


def forget() -> None:
    """Keep nothing: a benchmark pays for each of its repetitions."""
    _kept.clear()


def parameters(toy: str, seed: int) -> Named:
    """The toy's parameters as built, by name."""
    return {n: p.detach().clone() for n, p in TOYS[toy].build(seed).named_parameters()}


def buffers(toy: str, seed: int) -> Named:
    """The toy's buffers as built, by name."""
    return {n: b.detach().clone() for n, b in TOYS[toy].build(seed).named_buffers()}


def gradients(
    toy: str, seed: int, batches: Iterable[torch.Tensor], flags: Sequence[dict[str, Any]] = ()
) -> Gradients:
    """Gradients of the sum of the losses of all `batches`; the mean over ranks of `W * loss`.

    Args:
        flags: keyword arguments of the model, one per batch; none if empty.
    """
    inputs = list(batches)

    def compute() -> Gradients:
        module = TOYS[toy].build(seed)
        for batch, flag in zip(inputs, flags or [{}] * len(inputs), strict=True):
            sum_of_squares(module(batch, **flag)).backward()
        return {name: p.grad for name, p in module.named_parameters()}

    return dict(once((TOYS[toy], seed, wire.dumps((inputs, flags))), compute))


def zeros_for_none(found: Gradients, like: Named) -> Named:
    """Gradients with zeros where a parameter has none."""
    return {
        name: torch.zeros_like(like[name]) if gradient is None else gradient
        for name, gradient in found.items()
    }
