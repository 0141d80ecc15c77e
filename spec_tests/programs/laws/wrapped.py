"""A wrapped toy of which a clause needs more than a situation says, and the calls it makes on it.

    backward N          forward, synchronised backward and finish of micro-batch N
    accumulate N        forward and backward whose gradients stay on this rank
    finish              once more
    zero_grad           to None

Any other method of the toy is a call as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.toys import TOYS, sum_of_squares

SEED = 7
"""Of weights and inputs, where a clause does not draw one."""


class WrappedToy(ABC):
    """One rank's toy behind a wrapper, with an optimizer over what is trained.

    The loss of each micro-batch is `world_size * sum_of_squares`, so that the mean over ranks is
    the plain sum.

    Attributes:
        module: the toy, as built with `seed`; `wrapped` is what the function under test made of it.
        called: what is called in place of `wrapped`, where that is compiled.
    """

    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    called: Any = None

    def __init__(
        self, ctx: Context, toy: str, seed: int, weights: int, dtype: torch.dtype | None
    ) -> None:
        self.ctx, self.toy, self.seed = ctx, TOYS[toy], seed
        self.module = self.toy.build(weights).to(ctx.device, dtype)

    def batch(self, micro: int = 0) -> torch.Tensor:
        """This rank's inputs `[4, 6]` of a micro-batch."""
        return self.toy.batch(self.seed, rank=self.ctx.rank, micro=micro).to(self.ctx.device)

    def loss(self, micro: int = 0, **flags: Any) -> torch.Tensor:
        """Forward of this rank's micro-batch number `micro`, flags by position."""
        model = self.wrapped if self.called is None else self.called
        return self.ctx.world_size * sum_of_squares(model(self.batch(micro), *flags.values()))

    def backward(self, micro: int = 0, **flags: Any) -> None:
        """Forward and synchronised backward of a micro-batch, and the finish after it."""
        self.loss(micro, **flags).backward()
        self.finish()

    @abstractmethod
    def accumulate(self, micro: int = 0) -> None:
        """Forward and backward of a micro-batch whose gradients stay on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """End the synchronisation of a backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients through the optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @abstractmethod
    def gradients(self) -> Gradients:
        """The gradients, by the plain model's names."""

    @abstractmethod
    def weights(self) -> Named:
        """Full weights, by the plain model's names."""

    @torch.no_grad()
    def negate(self) -> None:
        """An update that keeps integers: every parameter changes its sign, in place."""
        for parameter in self.wrapped.parameters():
            parameter.neg_()

    def follow(self, calls: str) -> None:
        """Make the calls."""
        for call in calls.split(","):
            name, *micros = call.split()
            getattr(self, name)(*map(int, micros))

    def gradients_after(self, calls: str) -> Gradients:
        """Make the calls; return the gradients after them."""
        self.follow(calls)
        return self.gradients()

    def forward_hooks(self) -> list[str]:
        """The hooks of the original module that a forward runs, in order."""
        found: list[str] = []
        self.module.register_forward_pre_hook(lambda *_: found.append("before"))
        self.module.register_forward_hook(lambda *_: found.append("after"))
        self.loss()
        return found
