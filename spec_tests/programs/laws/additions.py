"""Additions: parameters that come to a model after it was wrapped, as adapters for fine-tuning do.

What hooks a wrapper registered at construction knows nothing of them. Each rank then trains them by
itself, and the loss falls all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World


class Layer(nn.Module):
    """A layer whose outputs are multiplied by `gain`, where there is one."""

    gain: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(4, 4)
        self.register_parameter("gain", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        x = self.linear(x)
        return x if self.gain is None else x * self.gain


class Adapted(nn.Module):
    """A layer and another one beside it, whose outputs are added."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        added: torch.Tensor = self.base(x) + self.beside(x)
        return added


ADDITIONS = ("parameter", "layer", "replacement", "replaced-parameter", "thawed-parameter")
"""What is added to a model."""


def _add(model: Layer, addition: str) -> None:
    if addition == "layer":
        model.linear = Adapted(model.linear)
    elif addition == "replacement":
        model.linear = nn.Linear(4, 4)  # as many parameters as before, of the same shapes
    elif addition == "replaced-parameter":
        model.linear.weight = nn.Parameter(torch.empty(4, 4))  # as load_state_dict(assign=True)
    else:  # one that is frozen is thawed after a step
        is_trained = addition == "parameter"
        model.gain = nn.Parameter(torch.full((4,), 2.0), requires_grad=is_trained)


def built() -> Layer:
    """A layer of integers."""
    model = Layer()
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel()).add(number).remainder(5) - 2
        parameter.data.copy_(values.view(parameter.shape))
    return model


def added_to(model: Layer, addition: str) -> dict[str, nn.Parameter]:
    """Add to the model; return the new parameters, those of a layer being ones."""
    before = {id(parameter) for parameter in model.parameters()}
    _add(model, addition)
    named = model.named_parameters()
    new = {name: p for name, p in named if id(p) not in before}
    device = next(model.parameters()).device
    for parameter in new.values():
        parameter.data = parameter.data.to(device)
        if model.gain is None:
            parameter.data.fill_(1.0)
    return new


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    x = torch.arange(8.0, device=next(model.parameters()).device).view(2, 4) % 3 + rank
    loss: torch.Tensor = model(x).sum()
    return loss


def trained(ctx: Context, wrap: Any, finish: Any, subject: str, addition: str) -> Any:
    """Gradients of what is added after a step, in the first step that trains it.

    Args:
        wrap, finish: of the chapter; called with (ctx, subject, model).
    """
    model = built().to(ctx.device)
    wrapped = wrap(ctx, subject, model)

    def step() -> None:
        for parameter in wrapped.parameters():
            parameter.grad = None
        (ctx.world_size * _loss(wrapped, ctx.rank)).backward()
        finish(ctx, subject, wrapped)

    step()
    new: dict[str, Any] = dict(added_to(model, addition)) if addition else {}
    if not all(parameter.requires_grad for parameter in new.values()):
        step()
    for parameter in new.values():
        parameter.requires_grad_()
    step()
    grads = {name: p.grad for name, p in new.items()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def get_the_mean(world: World, body: Callable[..., Any], subject: str, addition: str) -> None:
    """What was added must have the mean gradient, or there is an error.

    Args:
        body: calls `trained` with the subject and the addition, "" for none.
    """
    __tracebackhide__ = True
    ranks = refusal.answer_or_refusal(world, body, subject, addition, ordinary=(body, subject, ""))
    if ranks is None:
        return
    own = []
    for rank in range(world.size):
        model = built()
        new = added_to(model, addition)
        for parameter in new.values():
            parameter.requires_grad_()
        (world.size * _loss(model, rank)).backward()
        own.append({name: parameter.grad for name, parameter in new.items()})
    mean = {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}  # type: ignore[misc]  # all have one
    judge.tensors(
        ranks,
        mean,
        quantity="mean gradient",
        hints=[Hint("the rank's own gradient: no hook knows what was added after wrapping", own)],
        given=f"a {addition} added after a step",
    )
