"""One process that does what all ranks should: the oracle, and with a fault each way to be wrong.

A gradient is a sum of shares, one for each backward of each rank since `zero_grad`. The right
world gives every share the factor one. A wrong reduction gives other factors, a wrong forward
computes with older weights: so a wrong world is an entry of `FAULTS`, and needs no ranks. The same
table gives the `likely:` line of a failure, and the test that a situation tells a fault from what
is right (`exposed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from spec_tests.programs.calls import Program
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.toys import TOYS, sum_of_squares

SEED = 7


@dataclass(frozen=True)
class Share:
    """What one backward of one rank has added to the gradients.

    Attributes:
        rank: whose loss it was.
        micro: how many micro-batches came before it since the gradients were cleared.
        was_local: it was not reduced by its own backward, but by a later one.
        was_cleared: gradients were cleared since.
    """

    gradient: Gradients
    rank: int
    micro: int
    was_local: bool = False
    was_cleared: bool = False


@dataclass(frozen=True)
class Reader:
    """Who reads the gradients: a rank among so many, after so many micro-batches."""

    rank: int
    peers: tuple[int, ...]
    replica: tuple[int, ...]  # the ranks that share one copy of the weights with it
    micros: int

    @property
    def size(self) -> int:
        """Number of ranks whose mean is formed."""
        return len(self.peers)


Factor = Callable[[Share, Reader], float]


def _all(share: Share, reader: Reader) -> float:
    return float(not share.was_cleared)


def _of_live(factor: Factor) -> Factor:
    """Give shares that were cleared the factor zero."""
    return lambda share, reader: 0.0 if share.was_cleared else factor(share, reader)


@dataclass(frozen=True)
class Fault:
    """A wrong world.

    Attributes:
        means: what it usually comes from, for `likely:`.
        factor: the factor of a share, for a reader; right is one, and zero after `zero_grad`.
        is_stale: whether parameter number n computes with its values of before the last update.
        updates: whether a step updates parameter number n.
        notices: whether parameter number n notices that it was frozen or thawed.
    """

    means: str
    factor: Factor = _all
    is_stale: Callable[[int], bool] = lambda number: False
    updates: Callable[[int], bool] = lambda number: True
    notices: Callable[[int], bool] = lambda number: True


RIGHT = Fault("")
FAULTS: dict[str, Fault] = {
    "summed": Fault("summed over ranks and not averaged", _of_live(lambda s, r: r.size)),
    "local": Fault(
        "the rank's own gradient: it was never reduced",
        _of_live(lambda s, r: r.size * (s.rank == r.rank)),
    ),
    "divided-twice": Fault(
        "divided by the number of ranks twice", _of_live(lambda s, r: 1 / r.size)
    ),
    "divided-by-micro-batches": Fault(
        "divided by the number of micro-batches", _of_live(lambda s, r: 1 / max(1, r.micros))
    ),
    "last-alone": Fault(
        "the last micro-batch alone: earlier ones were lost",
        _of_live(lambda s, r: s.micro == r.micros - 1),
    ),
    "all-but-the-last": Fault(
        "the last micro-batch is missing", _of_live(lambda s, r: s.micro < r.micros - 1)
    ),
    "unreduced-lost": Fault(
        "micro-batches that waited for their reduction were lost",
        _of_live(lambda s, r: not s.was_local),
    ),
    "local-stays": Fault(
        "the last micro-batch was reduced, earlier ones stayed local",
        _of_live(lambda s, r: r.size * (s.rank == r.rank) if s.was_local else 1),
    ),
    "reduced-again": Fault(
        "earlier micro-batches were reduced again with the last one",
        _of_live(lambda s, r: 1 if s.micro == r.micros - 1 else r.size),
    ),
    "one-replica": Fault(
        "averaged over the ranks that share one copy of the weights, and not over the copies",
        _of_live(lambda s, r: r.size / len(r.replica) * (s.rank in r.replica)),
    ),
    "never-cleared": Fault(
        "what was cleared is still in it: a hidden accumulator", lambda s, r: 1.0
    ),
    "stale": Fault(
        "computed with the weights before the last update", is_stale=lambda number: True
    ),
    "stale-in-part": Fault(
        "every second parameter has its value of before the last update",
        is_stale=lambda number: number % 2 == 1,
    ),
    "one-optimizer": Fault(
        "the step of one optimizer counts, and that of the other does not",
        updates=lambda number: number % 2 == 0,
    ),
    "not-thawed": Fault(
        "a parameter that was frozen or thawed goes on as before", notices=lambda number: False
    ),
}
"""Every wrong world, by name."""


@dataclass
class Alone:
    """What one rank should see.

    Args:
        size, rank: which rank of how many it is.
        fault: the world that it lives in.
    """

    scene: Scene
    size: int
    rank: int
    fault: Fault = RIGHT
    shares: list[Share] = field(default_factory=list)
    older: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    saved: Any = None

    def __post_init__(self) -> None:
        self.toy = TOYS[self.scene["toy"][0]]
        self.module = self.toy.build(SEED)
        self.named = list(self.module.named_parameters())
        for number in self.scene["trained"]:
            self.named[number][1].requires_grad_(False)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks whose gradients are averaged with this rank's."""
        groups = self.scene["group"] or [range(self.size)]
        return next(tuple(group) for group in groups if self.rank in group)

    @cached_property
    def replica(self) -> tuple[int, ...]:
        """The ranks that hold one copy of the weights together."""
        _, shards = shape_of(self.scene, self.size)
        first = self.rank - self.rank % shards
        return tuple(range(first, first + shards))

    def follow(self, program: Program) -> list[tuple[str, Gradients]]:
        """Return what each call shows."""
        seen: list[tuple[str, Gradients]] = []
        for name, *words in program:
            found = getattr(self, name)(*words)
            if found is not None:
                seen.append((" ".join((name, *words)), found))
        return seen

    # --- the model

    def output(self, micro: str, rank: int) -> torch.Tensor:
        """Return the output for a rank's micro-batch, with the weights that the fault takes."""
        weights: dict[str, torch.Tensor] = dict(self.named)
        for number, (name, p) in enumerate(self.named):
            if name in self.older and self.fault.is_stale(number):
                weights[name] = self.older[name].requires_grad_(p.requires_grad)
        batch = self.toy.batch(SEED, rank=rank, micro=int(micro))
        flags = flags_of(self.scene, rank, micro)
        return torch.func.functional_call(self.module, weights, (batch, *flags))

    def _losses(self, *micros: str) -> list[torch.Tensor]:
        return [sum(sum_of_squares(self.output(m, rank)) for m in micros) for rank in self.peers]  # type: ignore[misc]  # no empty sum

    def _add(self, losses: Iterable[torch.Tensor], times: int = 1, was_local: bool = False) -> None:
        trained = {n: p for n, p in self.named if p.requires_grad}
        micro = self._micros()
        scale = times * len(self.peers) / (self.scene["divisor"] or len(self.peers))
        for rank, loss in zip(self.peers, losses, strict=True):
            found: tuple[torch.Tensor | None, ...] = (None,) * len(trained)
            if loss.requires_grad:
                found = torch.autograd.grad(
                    loss, [*trained.values()], allow_unused=True, retain_graph=True
                )
            by_name = dict(zip(trained, found, strict=True))
            scaled = {
                n: None if (g := by_name.get(n)) is None else scale * g for n, _ in self.named
            }
            self.shares.append(Share(scaled, rank, micro, was_local))

    def _micros(self) -> int:
        return 1 + max((s.micro for s in self.shares if not s.was_cleared), default=-1)

    def gradients(self) -> Gradients:
        """Return the mean over ranks of `size * loss`: the sum of all shares, by their factors."""
        reader = Reader(self.rank, self.peers, self.replica, self._micros())
        total: Gradients = {name: None for name, _ in self.named}
        for share in self.shares:
            factor = self.fault.factor(share, reader)
            for name, gradient in share.gradient.items() if factor else ():
                if gradient is not None:
                    before = total[name]
                    total[name] = (
                        factor * gradient if before is None else before + factor * gradient
                    )
        return total

    # --- the calls

    def backward(self, micro: str) -> Gradients:
        self._add(self._losses(micro))
        return self.gradients()

    def both(self, one: str, other: str) -> Gradients:
        self._add(self._losses(one, other))
        return self.gradients()

    def several(self, one: str, other: str) -> Gradients:
        self._add(self._losses(one))
        self._add(self._losses(other))
        return self.gradients()

    def twice(self, micro: str) -> Gradients:
        self._add(self._losses(micro), times=2)
        return self.gradients()

    def accumulate(self, micro: str) -> None:
        self._add(self._losses(micro), was_local=True)

    partly = locally = early = accumulate

    def nested(self, one: str, other: str) -> None:
        self.accumulate(one)
        self.accumulate(other)

    def forward(self, micro: str) -> None:
        self.losses = self._losses(micro)

    def pending(self) -> Gradients:
        self._add(self.losses)
        self.losses = []
        return self.gradients()

    def finish(self) -> Gradients:
        return self.gradients()

    def zero_grad(self, how: str = "none") -> None:
        self.shares = [replace(share, was_cleared=True) for share in self.shares]

    def evaluate(self, micro: str) -> Named:
        return {"output": self.output(micro, self.rank).detach()}

    infer = record = evaluate

    def step(self) -> Named:
        return self._step(lambda number: True)

    def step_one(self, which: str) -> Named:
        _, optimizers = self.scene["optimizer"]
        return self._step(lambda number: (number % optimizers == 0) is (which == "first"))

    def _step(self, updates: Callable[[int], bool]) -> Named:
        self._turn(lambda n, p: p.requires_grad and updates(n) and self.fault.updates(n))
        self.shares = []
        return self.full()

    def write(self, where: str) -> None:
        one = one_of(self.named)
        self._turn(lambda number, p: number == one or where != "one-parameter")

    @torch.no_grad()
    def _turn(self, which: Callable[[int, torch.Tensor], bool]) -> None:
        for number, (name, p) in enumerate(self.named):
            if which(number, p):
                self.older[name] = p.detach().clone()
                p.neg_()

    def full(self) -> Named:
        """Return the full weights."""
        return {name: p.detach().clone() for name, p in self.named}

    def freeze(self, number: str) -> None:
        if self.fault.notices(int(number)):
            self.named[int(number)][1].requires_grad_(False)

    def thaw(self, number: str) -> None:
        if self.fault.notices(int(number)):
            self.named[int(number)][1].requires_grad_(True)

    def save(self) -> None:
        self.saved = self.full()

    @torch.no_grad()
    def load(self, assigns: str) -> Named:
        for name, p in self.named:
            self.older[name] = p.detach().clone()
            p.copy_(self.saved[name])
        self.shares = []
        return self.full()

    def unshard(self, at_once: str) -> Named | None:
        return self.full() if at_once == "now" else None

    def nothing(self, *words: str) -> None:
        """Show nothing, and change nothing."""

    fails = fails_backward = keep = reshard = wait = leave = another_steps = another_lives = nothing


def one_of(parameters: Sequence[Any]) -> int:
    """Return the number of the parameter that is written alone: the second of a unit, if any is."""
    return min(3, len(parameters) - 1)


def shape_of(scene: Scene, size: int) -> tuple[int, int]:
    """Return the number of copies of the weights, and of ranks that share one."""
    shape = [size if n is None else n for n in scene["mesh"] or (None,)]
    return (1, *shape)[-2:]  # type: ignore[return-value]  # two numbers


def flags_of(scene: Scene, rank: int, micro: str) -> tuple[str, ...]:
    """Return the flags of a rank's micro-batch, for the model."""
    _, use, by_rank = scene["toy"]
    return (use[(by_rank * rank + int(micro)) % len(use)],) if use else ()


def exposed(scene: Scene, program: Program, size: int = 2) -> frozenset[str]:
    """Return the faults that a situation tells from what is right. No ranks are needed."""
    right = [Alone(scene, size, rank).follow(program) for rank in range(size)]
    found = set()
    for name, fault in FAULTS.items():
        wrong = [Alone(scene, size, rank, fault).follow(program) for rank in range(size)]
        calls = (
            (a[1], b[1])
            for x, y in zip(right, wrong, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        if any(_differ(one, other) for one, other in calls):
            found.add(name)
    return frozenset(found)


def _differ(one: Gradients, other: Gradients) -> bool:
    def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    return any(not same(value, other[name]) for name, value in one.items())
