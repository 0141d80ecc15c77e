"""One process that does what all ranks should: the oracle, and with a fault each way to be wrong.

It lives in the right world or in a wrong one (`faults.py`). The wrong ones give the `likely:` line
of a failure, and the test that a situation tells a fault from what is right (`exposed`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spec_tests.programs.calls import Program
from spec_tests.programs.faults import FAULTS, RIGHT, Fault, Reader, Share
from spec_tests.programs.machine import Machine
from spec_tests.programs.scene import Scene
from spec_tests.programs.units import parameters_of_units
from spec_tests.programs.uses import forward_that_counts
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.toys import TOYS, sum_of_squares

SEED = 7
ORDERS = {"two": 2.0, "largest": float("inf")}
"""Which norm `clip` takes."""
LARGE = 1e30
"""A norm that no gradient has."""


@dataclass
class Alone(Machine):
    """What one rank should see.

    Args:
        size, rank: which rank of how many it is.
        fault: the world that it lives in.
        is_replicated: ranks are replicas, whose training forwards take the first rank's buffers.
    """

    scene: Scene
    size: int
    rank: int
    fault: Fault = RIGHT
    is_replicated: bool = False
    shares: list[Share] = field(default_factory=list)
    older: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    saved: Any = None

    def __post_init__(self) -> None:
        self.toy = TOYS[self.scene["toy"][0]]
        self.module = self._begun()
        self.named = list(self.module.named_parameters())
        self.held = [p for _, p in self.named]
        for number in self.scene["trained"] if self.fault.heeds_frozen else ():
            self.named[number][1].requires_grad_(False)
        self.buffers = {rank: first_buffer(rank) for rank in self.peers}
        if self.is_replicated:
            self._take_buffers()

    @torch.no_grad()
    def _begun(self) -> torch.nn.Module:
        """Return the toy with the weights that it starts from."""
        seeds = [SEED + r * self.scene["seeds"] for r in self.fault.starts_from(self)]
        module, *others = map(self.toy.build, seeds)
        for p, *more in zip(module.parameters(), *(o.parameters() for o in others), strict=True):
            p.copy_(torch.stack([p, *more]).double().mean(0))
        return module

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks of this rank's process group."""
        return self.scene.peers(self.size, self.rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks whose gradients are averaged with this rank's."""
        return self.group if self.fault.heeds_groups else tuple(range(self.size))

    @cached_property
    def inner(self) -> list[str]:
        """Names of the parameters of all units but the outermost one."""
        return parameters_of_units(self.module, self.scene.word("units"))

    @cached_property
    def replica(self) -> tuple[int, ...]:
        """The ranks that hold one copy of the weights together."""
        _, shards = shape_of(self.scene, self.size)
        first = self.rank - self.rank % shards
        return tuple(range(first, first + shards))

    # --- the model

    def output(self, micro: str, rank: int) -> torch.Tensor:
        """Return the output for a rank's micro-batch, with the weights that the fault takes."""
        weights = self._gathered()
        batch = self.toy.batch(SEED, rank=rank, micro=int(micro))
        flags = flags_of(self.scene, rank, micro)
        forward = partial(torch.func.functional_call, self.module, weights, (batch, *flags))
        if self.fault.counts is None:
            return forward()
        return forward_that_counts(forward, weights.values(), self.fault.counts)

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return the weights that a forward takes."""
        weights: dict[str, torch.Tensor] = dict(self.named)
        for number, (name, p) in enumerate(self.named):
            if name in self.older and self.fault.is_stale(number, name not in self.inner):
                weights[name] = self.older[name].requires_grad_(p.requires_grad)
        return weights

    def _losses(self, *micros: str, is_local: bool = False) -> list[torch.Tensor]:
        outputs = [self._trained(micro, is_local) for micro in micros]
        return [sum(map(sum_of_squares, of_rank)) for of_rank in zip(*outputs, strict=True)]  # type: ignore[misc]  # no empty sum

    def _trained(self, micro: str, is_local: bool) -> list[torch.Tensor]:
        """Return the output of a training forward for each rank; buffers change."""
        outputs = [self.output(micro, rank) for rank in self.peers]
        if not self.scene["buffers"]:
            return outputs
        if self.is_replicated and self.scene["mode"] and self.fault.takes_buffers(is_local):
            self._take_buffers()
        for number, rank in enumerate(self.peers):
            outputs[number] = outputs[number] + self.buffers[rank]
            if self.scene["buffers"] == "integers":
                outputs[number] = outputs[number] + self.buffers[rank] % 2  # the other buffer
            if self.scene["mode"]:
                batch = self.toy.batch(SEED, rank=rank, micro=int(micro))
                self.buffers[rank] = next_buffer(self.buffers[rank], batch)
        return outputs

    def _take_buffers(self) -> None:
        self.buffers = dict.fromkeys(self.peers, self.buffers[self.peers[0]])

    def _add(
        self,
        losses: Iterable[torch.Tensor],
        was_local: bool = False,
        of: Container[str] | None = None,
        micro: int | None = None,
    ) -> None:
        trained = {n: p for n, p in self.named if p.requires_grad and (of is None or n in of)}
        micro = self._micros() if micro is None else micro
        scale = len(self.peers) / (self.scene["divisor"] or len(self.peers))
        for rank, loss in zip(self.peers, losses, strict=True):
            found: tuple[torch.Tensor | None, ...] = (None,) * len(trained)
            if loss.requires_grad and trained:
                found = torch.autograd.grad(
                    loss, [*trained.values()], allow_unused=True, retain_graph=True
                )
            by_name = dict(zip(trained, found, strict=True))
            scaled = {
                name: None
                if (g := by_name.get(name)) is None
                else self._of_rank(rank, len(self.peers) * g)
                if number in self.scene["ignored"]
                else scale * g
                for number, (name, _) in enumerate(self.named)
            }
            self.shares.append(Share(scaled, rank, micro, was_local))

    def _of_rank(self, rank: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return what this rank has of a gradient that nobody reduces."""
        return gradient if rank == self.rank else None

    def _micros(self) -> int:
        return 1 + max((s.micro for s in self.shares if not s.was_cleared), default=-1)

    def gradients(self, fault: Fault | None = None) -> Gradients:
        """Return the mean over ranks of `size * loss`: the sum of all shares, by their factors."""
        sizes = (self.size, len(self.group))
        reader = Reader(self.rank, self.peers, self.replica, self._micros(), *sizes)
        total: Gradients = {name: None for name, _ in self.named}
        fault = fault or self.fault
        for share in self.shares:
            is_gone = share.was_cleared and fault.clears(share)
            factor = 0.0 if is_gone else fault.factor(share, reader)
            for name, gradient in share.gradient.items() if factor else ():
                if gradient is not None:
                    before = total[name]
                    total[name] = (
                        factor * gradient if before is None else before + factor * gradient
                    )
        return total

    # --- the calls

    def backward(self, *micros: str) -> Gradients:
        self._add(self._losses(*micros))
        return self.gradients()

    both = backward

    def beside(self, micro: str) -> Gradients:
        other = Alone(Scene.of("even"), self.size, self.rank, self.fault, self.is_replicated)
        found = other.backward(micro)
        return self.backward(micro) | {f"other {name}": g for name, g in found.items()}

    def several(self, one: str, other: str) -> Gradients:
        self.backward(one)
        return self.backward(other)

    def twice(self, micro: str) -> Gradients:
        losses = self._losses(micro)
        self._add(losses)
        self._add(losses)
        return self.gradients()

    def begun(self, micro: str) -> None:
        self.backward(micro)

    def local(self) -> Gradients:
        return self.gradients(FAULTS["local"] if self.fault.heeds_no_sync else None)

    def accumulate(self, micro: str) -> None:
        self._add(self._losses(micro, is_local=True), was_local=True)

    locally = early = accumulate

    def partly(self, micro: str) -> Gradients | None:
        """Return gradients where there is one copy of the weights, so that nothing waits."""
        if not self.scene["mesh"]:
            return self.backward(micro)
        self.accumulate(micro)
        return None

    def directly(self, micro: str) -> Gradients:
        own = len(self.peers) * self._losses(micro, is_local=True)[self.peers.index(self.rank)]
        trained = {n: p for n, p in self.named if p.requires_grad}
        found = torch.autograd.grad(own, [*trained.values()], allow_unused=True)
        self.zero_grad()
        return dict.fromkeys(n for n, _ in self.named) | dict(zip(trained, found, strict=True))

    def outermost_waits(self, micro: str) -> Gradients | None:
        losses, number = self._losses(micro), self._micros()
        names = parameters_of_units(self.module, self.scene.word("units"))
        self._add(losses, of=names, micro=number)
        self._add(losses, was_local=True, of={n for n, _ in self.named} - {*names}, micro=number)
        found = self.gradients()
        return {name: found[name] for name in names} or None

    def nested(self, one: str, other: str) -> None:
        self.accumulate(one)
        self.accumulate(other)

    prepared = nested

    def forward(self, micro: str) -> None:
        self.losses = self._losses(micro)

    def pending(self) -> Gradients:
        self._add(self.losses)
        self.losses = []
        return self.gradients()

    resumed = pending

    def finish(self) -> Gradients:
        return self.gradients()

    def zero_grad(self, how: str = "none") -> None:
        self.shares = [replace(share, was_cleared=True) for share in self.shares]

    def clip(self, order: str) -> Gradients:
        found = {n: g.double() for n, g in self.gradients().items() if g is not None}
        # A wrong world may have no gradient at all.
        every = torch.cat([torch.zeros(0).double(), *(g.flatten() for g in found.values())])
        norm = torch.linalg.vector_norm(every, ORDERS[order])
        self.zero_grad()
        clipped = {name: g * (norm / 2 / (norm + 1e-6)) for name, g in found.items()}
        return {"norm": norm} | dict.fromkeys(n for n, _ in self.named) | clipped

    def evaluate(self, micro: str) -> Named:
        return {"output": self.output(micro, self.rank).detach()}

    infer = evaluate_apart = evaluate

    def aside(self, micro: str) -> Named:
        found = self.evaluate(micro)
        self.accumulate(micro)
        return found

    def record(self, micro: str) -> Named:
        outputs = self._trained(micro, is_local=False)
        return {"output": outputs[self.peers.index(self.rank)].detach()}

    def fails_backward(self, micro: str, layer: str) -> None:
        self._losses(micro)  # its forward changes buffers

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
        return {name: p.detach().clone() for name, p in self.named}

    def freeze(self, number: str, requires_grad: bool = False) -> None:
        if self.fault.notices(int(number)):
            super().freeze(number, requires_grad)

    def save(self) -> None:
        self.saved = self.full(), dict(self.buffers)

    @torch.no_grad()
    def load(self, assigns: str) -> Named:
        weights, buffers = self.saved
        self.buffers = dict(buffers)
        for name, p in self.named:
            self.older[name] = p.detach().clone()
            p.copy_(weights[name])
        self.shares = []
        return self.full()

    def unshard(self, at_once: str) -> Named | None:
        if at_once != "now":
            return None
        return {name: p.detach().clone() for name, p in self._gathered().items()}

    def wait(self) -> Named | None:
        return self.unshard("now") if self.before == ("unshard", "in-flight") else None

    fails = keep = reshard = leave = Machine.nothing


def first_buffer(rank: int) -> float:
    """Return a rank's buffer before the first forward."""
    return float(rank % 4)


def next_buffer(value: Any, batch: torch.Tensor) -> Any:
    """Return what a forward with this batch makes of a buffer: a small integer."""
    flat = batch.flatten().float()
    return (value + float(flat @ torch.arange(len(flat), device=flat.device).float())) % 5


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


def exposed(
    scene: Scene, program: Program, size: int, is_replicated: bool, among: Iterable[str]
) -> frozenset[str]:
    """Return which of these faults a situation tells from what is right. No ranks are needed."""

    def world(fault: Fault) -> Any:
        ranks = [Alone(scene, size, rank, fault, is_replicated) for rank in range(size)]
        return tree_leaves([rank.follow(program) for rank in ranks])

    def same(one: Any, other: Any) -> bool:
        are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return torch.equal(one, other) if are_tensors else one is other or one == other

    right = world(RIGHT)
    return frozenset(name for name in among if not all(map(same, right, world(FAULTS[name]))))
