"""Programs: any sequence of training calls does on many ranks what it does in one process.

A single clause tests one situation. Faults that need three calls in an unexpected order pass all of
them: weights that are stale after an evaluation *between* backward and step, a window that stays
open after an exception, momentum that a load restores on one rank only. So hypothesis draws the
sequence (`program_machine`), the ranks and one process run it, and the results are compared call by
call.

    micro(n)        forward, backward and finish of micro-batch n, synchronised
    local(n)        the same inside no_sync
    finish()        once more
    step()          of the optimizer; then the weights are compared
    zero_grad(b)    set_to_none=b
    rate(g, e)      the learning rate of parameter group g is 2**e from now on
    evaluate(n)     forward without gradients; the outputs are compared
    interrupt(n)    an exception in the middle, on every rank, which the trainer catches
    save(), load()  weights and optimizer, to memory and back; then the weights are compared

Both sides are a `Trainee`, and a program is a tuple of calls on it, so that expectation and
observation differ only in what is judged.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spec_tests.laws.wrapped import WrappedToy
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Named, once
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance
from spec_tests.rig.toys import TOYS, sum_of_squares

Call = tuple[Any, ...]
Program = tuple[Call, ...]
Moments = list[tuple[str, Named]]

RATE, MOMENTUM = -16, 0.5
"""Exponent of the learning rate, and momentum, that a program starts with, in both groups.

Measured on toy 'mlp' over 150 programs: a step moves a weight by 80 times what rounding is allowed
to move it (median), and float32 differs from float64 by a thousandth of what it is allowed to. Much
smaller rates would not show what a call does, and from 2**-13 on some programs diverge."""


class PlantedError(Exception):
    """What `interrupt` raises."""


def copies(state: Any) -> Any:
    """The same with tensors of its own. `copy.deepcopy` cannot copy a DTensor of a view's rows."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


class Trainee(ABC):
    """What a program runs on: calls return what is to be compared, None where that is nothing.

    Besides these, `local(number)`, `finish()` and `evaluate(number)` where programs have such
    calls. Abstract, for what raises NotImplementedError in a rank counts as not offered, and would
    be skipped.

    Attributes:
        module: what is trained; its state dict is the plain model's.
        optimizer: with two parameter groups, see `two_groups`.
        saved: weights and optimizer, after `save`.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    saved: Any = None

    @abstractmethod
    def micro(self, number: int) -> None:
        """A synchronised micro-batch."""

    def step(self) -> Named:
        """Update the weights."""
        self.optimizer.step()
        return self.weights()

    def zero_grad(self, set_to_none: bool) -> None:
        """Discard what has gathered."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def rate(self, group: int, exponent: int) -> None:
        """Change a learning rate."""
        self.optimizer.param_groups[group]["lr"] = 2.0**exponent

    @abstractmethod
    def interrupt(self, number: int) -> None:
        """An exception in the middle of the forward, caught by the trainer."""

    def save(self) -> None:
        """Keep weights and optimizer."""
        self.saved = copies((self.module.state_dict(), self.optimizer_state()))

    def load(self) -> Named:
        """Put back what `save` kept."""
        weights, optimizer = copies(self.saved)
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        return self.weights()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state as its `load_state_dict` takes it."""
        return self.optimizer.state_dict()

    def weights(self) -> Named:
        """Full weights by the plain model's names."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


class OneProcess(Trainee):
    """The oracle: a plain model that sees the micro-batches of all ranks.

    Args:
        size: number of ranks that it stands for.
        rank: whose part an evaluation sees.
    """

    def __init__(self, toy: str, seed: int, *, size: int, rank: int) -> None:
        self.toy, self.seed, self.size, self.rank = TOYS[toy], seed, size, rank
        self.module = self.toy.build(seed)
        self.optimizer = plain_optimizer(self.module.parameters())

    def micro(self, number: int) -> None:  # noqa: D102 - as in the base
        for rank in range(self.size):
            batch = self.toy.batch(self.seed, rank=rank, micro=number)
            sum_of_squares(self.module(batch)).backward()

    local = micro

    def finish(self) -> None:
        """Nobody to wait for."""

    def evaluate(self, number: int) -> Named:  # noqa: D102
        with torch.no_grad():
            return {"output": self.module(self.toy.batch(self.seed, rank=self.rank, micro=number))}

    def interrupt(self, number: int) -> None:
        """A forward that is caught leaves nothing."""


class OneRank(Trainee):
    """A rank's wrapped toy, with an optimizer over the parameters that it trains."""

    def __init__(self, toy: WrappedToy, trained: Iterable[nn.Parameter]) -> None:
        self.toy, self.module = toy, toy.module
        self.optimizer = plain_optimizer(trained)
        self.local, self.finish, self.evaluate = toy.accumulate, toy.finish, toy.evaluate

    def micro(self, number: int) -> None:  # noqa: D102
        self.toy.backward(number)

    def interrupt(self, number: int) -> None:  # noqa: D102
        with failing(list(self.module.children())[-1]):
            self.toy.loss(number)

    def weights(self) -> Named:  # noqa: D102
        return self.toy.weights()


def two_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two parameter groups, of the even and of the odd parameters."""
    held = list(parameters)
    return [{"params": held[::2]}, {"params": held[1::2]}]


def plain_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum over two groups."""
    return torch.optim.SGD(two_groups(parameters), lr=2.0**RATE, momentum=MOMENTUM)


@contextlib.contextmanager
def failing(part: nn.Module, *, prepend: bool = False) -> Iterator[None]:
    """The forward of `part` raises, with `prepend` before its hooks; the trainer catches that."""

    def fail(*_: object) -> None:
        raise PlantedError

    handle = part.register_forward_pre_hook(fail, prepend=prepend)
    try:
        yield
    except PlantedError:
        pass
    finally:
        handle.remove()


def run(program: Program, trainee: Trainee) -> Moments:
    """What each call of the program let see, and the weights after one last ordinary step."""
    closing = (("micro", len(program)), ("step",))
    moments = []
    for number, (name, *arguments) in enumerate((*program, *closing)):
        seen = getattr(trainee, name)(*arguments)
        if seen is not None:
            moments.append((f"call {number}, {spelled(name, *arguments)}", seen))
    return moments


def _run_alone(program: Program, trainee: Trainee) -> Moments:
    if type(trainee) is not OneProcess:
        return run(program, trainee)
    # Each function that is judged gets the same programs.
    key = ("program", program, trainee.toy, trainee.seed, trainee.size, trainee.rank)
    return once(key, lambda: run(program, trainee))


def spelled(name: str, *arguments: object) -> str:
    """The call as one would write it."""
    return f"{name}({', '.join(map(str, arguments))})"


def agree(
    ranks: Sequence[Moments],
    alone: Callable[[int], Trainee],
    program: Program,
    *,
    within: Tolerance | None = None,
    given: str = "",
) -> None:
    """Every rank must have seen, at every call, what one process sees.

    Args:
        ranks: what `run` returned on each rank.
        alone: the oracle of a rank.

    Raises:
        Violation: at the first call that differs, with the program.
    """
    __tracebackhide__ = True
    expected = [_run_alone(program, alone(rank)) for rank in range(len(ranks))]
    text = "; ".join(spelled(*call) for call in program)
    before: list[Named] = [{} for _ in ranks]
    for index, (when, _) in enumerate(expected[0]):
        wanted = [moments[index][1] for moments in expected]
        judge.tensors(
            [moments[index][1] for moments in ranks],
            wanted,
            quantity=f"value of one process at {when}",
            within=within,
            hints=[Hint("as before: this call changed nothing", before)],
            given=", ".join(filter(None, [given, f"program: {text}"])),
        )
        before = wanted
