"""Machines: what follows a program, in one process or on a rank.

A machine has a method for each verb of the functions that it stands for. What a method returns is
shown, and compared with what another machine shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from spec_tests.programs.calls import Program

Watching = Callable[[str], AbstractContextManager[Any]]
"""What surrounds a call, whose name it is given."""


class Machine:
    """What follows a program.

    Attributes:
        ctx: of a rank; an oracle has none.
        held: the parameters, in the order of their numbers.
        before: the call before this one.
    """

    ctx: Any = None
    before: tuple[str, ...] = ()
    held: Any

    def follow(
        self, program: Program, watching: Watching = contextlib.nullcontext
    ) -> list[tuple[str, Any]]:
        """Return what each call shows; each is watched from its beginning to its end."""
        seen = []
        for name, *words in program:
            with watching(name):
                found = getattr(self, name)(*words)
            self.before = (name, *words)
            if found is not None:
                seen.append((" ".join((name, *words)), found))
        return seen

    def freeze(self, number: str, requires_grad: bool = False) -> None:
        """Let a parameter require no gradient."""
        self.held[int(number)].requires_grad_(requires_grad)

    def thaw(self, number: str) -> None:
        """Let it require one again."""
        self.freeze(number, True)

    def another_steps(self, rank: str) -> None:
        """A model of its own is trained by one rank alone; of an oracle nothing is seen."""
        if self.ctx is not None and self.ctx.rank == int(rank):
            probe = nn.Linear(2, 2)
            probe(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(probe.parameters(), lr=0.5).step()

    def nothing(self, *words: Any) -> None:
        """Show nothing, and change nothing."""

    another_lives: Callable[..., None] = nothing
