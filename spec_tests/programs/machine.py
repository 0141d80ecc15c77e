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

from spec_tests.programs.calls import Program, parsed
from spec_tests.programs.planted import PlantedError
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge.oracle import Gradients, Named

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
        self, program: Program | str, watching: Watching = contextlib.nullcontext
    ) -> list[tuple[str, Any]]:
        """Return what each call shows; each is watched from its beginning to its end."""
        seen = []
        for name, *words in parsed(program):
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


class Training(Machine):
    """What follows a program of a model: the calls that are the same in one process and on a rank.

    Attributes:
        loss: returns the loss of micro-batches, which has a `backward`.
        quietly: returns a context; within, gradients stay on their rank.
        finish_backward: ends a backward.
        gradients: returns them, by the plain model's names.
        evaluate: returns the output for a micro-batch, by its name.
        _step: updates parameters, those whose numbers it is told, and returns all weights.
        losses: the loss whose backward is a later call.
    """

    loss: Callable[..., Any]
    quietly: Callable[[], AbstractContextManager[Any]]
    finish_backward: Callable[..., None] = Machine.nothing
    gradients: Callable[[], Gradients]
    evaluate: Callable[[str], Named]
    scene: Scene
    _step: Callable[[Callable[[int], bool]], Named]
    losses: Any = None

    def backward(self, *micros: str) -> Gradients:
        self.loss(*micros).backward()
        return self.finish()

    both = backward

    def begun(self, micro: str) -> None:
        self.loss(micro).backward()

    def several(self, one: str, other: str) -> Gradients:
        self.begun(one)
        return self.backward(other)

    def twice(self, micro: str) -> Gradients:
        loss = self.loss(micro)
        loss.backward(retain_graph=True)
        loss.backward()
        return self.finish()

    def accumulate(self, micro: str) -> None:
        with self.quietly():
            self.loss(micro).backward()

    locally = accumulate

    def nested(self, one: str, other: str) -> None:
        with self.quietly():
            with contextlib.suppress(PlantedError), self.quietly():
                self.loss(one).backward()
                if int(one) % 2:
                    raise PlantedError
            self.loss(other).backward()

    def prepared(self, *micros: str) -> None:
        windows = [self.quietly() for _ in micros]
        for window, micro in zip(windows, micros, strict=True):
            with window:
                self.loss(micro).backward()

    def leave(self) -> None:
        with contextlib.suppress(PlantedError), self.quietly():
            raise PlantedError

    def aside(self, micro: str) -> Named:
        with self.quietly():
            found = self.evaluate(micro)
            self.loss(micro).backward()
        return found

    def forward(self, micro: str) -> None:
        self.losses = self.loss(micro)

    def pending(self) -> Gradients:
        self.losses.backward()
        self.losses = None
        return self.finish()

    resumed = pending

    def finish(self) -> Gradients:
        self.finish_backward()
        return self.gradients()

    def step(self) -> Named:
        return self._step(lambda number: True)

    def step_one(self, which: str) -> Named:
        _, optimizers = self.scene["optimizer"]
        return self._step(lambda number: (number % optimizers == 0) is (which == "first"))
