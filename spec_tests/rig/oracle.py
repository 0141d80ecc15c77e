"""What is right: one process, the whole batch, float64, no tricks.

The oracle runs in the parent. It never touches an implementation, and an implementation never
sees it. Each function below is a few lines of plain PyTorch, because it is the one thing that
nothing else checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.rig.toys import TOYS, sum_of_squares

Named = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]


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
    module = TOYS[toy].build(seed)
    inputs = list(batches)
    for batch, flag in zip(inputs, flags or [{}] * len(inputs), strict=True):
        sum_of_squares(module(batch, **flag)).backward()
    return gradients_of(module)


def gradients_of(module: nn.Module) -> Gradients:
    """`.grad` of every parameter, cloned, None where there is none."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def trained(
    toy: str,
    seed: int,
    steps: Iterable[Sequence[torch.Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> Named:
    """Parameters after training on the batches of each step, all in one process."""
    module = TOYS[toy].build(seed)
    plain = optimizer(module.parameters(), **options)
    for batches in steps:
        plain.zero_grad()
        for batch in batches:
            sum_of_squares(module(batch)).backward()
        plain.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def zeros_for_none(found: Gradients, like: Named) -> Named:
    """Gradients with zeros where a parameter has none."""
    return {
        name: torch.zeros_like(like[name]) if gradient is None else gradient
        for name, gradient in found.items()
    }
