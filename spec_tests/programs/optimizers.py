"""Optimizers of scenes, and the groups in which they get their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

SGD = partial(torch.optim.SGD, lr=1.0)
# The step of SGD: without moments, beside an eps that no gradient reaches. DTensors take no fused
# SGD.
FUSED = partial(torch.optim.Adam, lr=2.0**100, betas=(0.0, 0.0), eps=2.0**100, fused=True)


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in its groups, and halves every second one.

    Args:
        begins: whether the count is there from the beginning.
    """

    def __init__(self, params: Any, lr: float, begins: bool = True) -> None:
        super().__init__(params, {"lr": lr, "steps": 0} if begins else {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        """Update; `factor` multiplies the rate."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = factor * group["lr"] / (1 + group.setdefault("steps", 0) % 2)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rate)
            group["steps"] += 1
        return loss


class AsIs(torch.optim.SGD):
    """SGD as an exercise has one write it: `step` calls the closure in the caller's grad mode."""

    def step(self, closure: Any = None) -> Any:
        """Evaluate, then update."""
        loss = None if closure is None else closure()
        super().step()
        return loss


class Hooked(torch.optim.SGD):
    """SGD that makes each of its updates twice, the second time in a hook of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.register_step_post_hook(_once_more)


@torch.no_grad()
def _once_more(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-group["lr"])


def dealt(held: Sequence[Any], number: int) -> list[dict[str, Any]]:
    """Return so many groups of parameters that are dealt to them in turn."""
    number = min(number, len(held))
    return [{"params": held[n::number]} for n in range(number)]


def with_options(held: Sequence[Any]) -> list[dict[str, Any]]:
    """Return three groups with options of their own; the first has a single parameter."""
    groups: list[dict[str, Any]] = [
        {"params": held[:1], "lr": 0.5},
        {"params": held[1::2], "weight_decay": 0.25},
        {"params": held[2::2]},
    ]
    return [group for group in groups if group["params"]]
