"""One process that does what all ranks should: the oracle, and with a fault each way to be wrong.

It lives in the right world or in a wrong one (`faults.py`), which gives the `likely:` line of a
failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from spec_tests.programs.faults import FAULTS, RIGHT, Fault, Share
from spec_tests.programs.machine import Training
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
class Alone(Training):
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
    is_local: bool = False
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

    @property
    def num_peers(self) -> int:
        """Number of ranks whose mean is formed."""
        return len(self.peers)

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
        return forward_that_counts(forward, weights.values(), self.fault.counts)

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return the weights that a forward takes."""
        weights: dict[str, torch.Tensor] = dict(self.named)
        for number, (name, p) in enumerate(self.named):
            if name in self.older and self.fault.is_stale(number, name not in self.inner):
                weights[name] = self.older[name].requires_grad_(p.requires_grad)
        return weights

    def loss(self, *micros: str) -> Losses:
        outputs = zip(*map(self._trained, micros), strict=True)
        return Losses(self, [sum(map(sum_of_squares, of_rank)) for of_rank in outputs])  # type: ignore[misc]  # no empty sum

    def _trained(self, micro: str) -> list[torch.Tensor]:
        """Return the output of a training forward for each rank; buffers change."""
        outputs = [self.output(micro, rank) for rank in self.peers]
        if not self.scene["buffers"]:
            return outputs
        if self.is_replicated and self.scene["mode"] and self.fault.takes_buffers(self.is_local):
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

    def add(
        self, losses: Iterable[torch.Tensor], micro: int, of: Container[str] | None = None
    ) -> None:
        """Add what a backward of each rank's loss leaves, for these parameters or for all."""
        trained = {n: p for n, p in self.named if p.requires_grad and (of is None or n in of)}
        ignored = [n for number, (n, _) in enumerate(self.named) if number in self.scene["ignored"]]
        scale = self.num_peers / (self.scene["divisor"] or self.num_peers)
        for rank, loss in zip(self.peers, losses, strict=True):
            found: tuple[torch.Tensor | None, ...] = ()
            if loss.requires_grad and trained:
                found = torch.autograd.grad(
                    loss, [*trained.values()], allow_unused=True, retain_graph=True
                )
            gradient = {
                name: (self.num_peers if name in ignored else scale) * g
                for name, g in zip(trained, found, strict=False)
                # Nobody reduces what is ignored: a rank has its own.
                if g is not None and (name not in ignored or rank == self.rank)
            }
            self.shares.append(Share(gradient, rank, micro, self.is_local))

    @property
    def micros(self) -> int:
        """Number of micro-batches since gradients were cleared."""
        return 1 + max((s.micro for s in self.shares if not s.was_cleared), default=-1)

    def gradients(self, fault: Fault | None = None) -> Gradients:
        """Return the mean over ranks of `size * loss`: the sum of all shares, by their factors."""
        total: Gradients = dict.fromkeys(name for name, _ in self.named)
        fault = fault or self.fault
        for share in self.shares:
            is_gone = share.was_cleared and fault.clears(share)
            factor = 0.0 if is_gone else fault.factor(share, self)
            for name, gradient in share.gradient.items() if factor else ():
                before = total[name]
                total[name] = factor * gradient if before is None else before + factor * gradient
        return total

    # --- the calls

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        before, self.is_local = self.is_local, True
        try:
            yield
        finally:
            self.is_local = before

    amid = Training.backward

    def beside(self, micro: str) -> Gradients:
        other = Alone(Scene.of("even"), self.size, self.rank, self.fault, self.is_replicated)
        found = other.backward(micro)
        return self.backward(micro) | {f"other {name}": g for name, g in found.items()}

    def local(self) -> Gradients:
        return self.gradients(FAULTS["local"] if self.fault.heeds_no_sync else None)

    early = Training.accumulate

    def partly(self, micro: str) -> Gradients | None:
        """Return gradients where there is one copy of the weights, so that nothing waits."""
        if not self.scene["mesh"]:
            return self.backward(micro)
        self.accumulate(micro)
        return None

    def directly(self, micro: str) -> Gradients:
        self.zero_grad()
        kept, self.shares = self.shares, []
        self.accumulate(micro)
        found, self.shares = self.gradients(FAULTS["local"]), kept
        return found

    def outermost_waits(self, micro: str) -> Gradients | None:
        losses, number = self.loss(micro).of_ranks, self.micros
        self.add(losses, number, self.inner)
        with self.quietly():
            self.add(losses, number, {n for n, _ in self.named} - {*self.inner})
        found = self.gradients()
        return {name: found[name] for name in self.inner} or None

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

    def record(self, micro: str) -> Named:
        outputs = self._trained(micro)
        return {"output": outputs[self.peers.index(self.rank)].detach()}

    def fails_backward(self, micro: str, layer: str) -> None:
        self.loss(micro)  # its forward changes buffers

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

    fails = keep = reloads = reshard = Training.nothing


@dataclass(frozen=True)
class Losses:
    """The loss of each rank, of which a backward adds to the gradients."""

    alone: Alone
    of_ranks: list[torch.Tensor]

    def backward(self, retain_graph: bool = False) -> None:
        """Add the gradients of every rank's loss."""
        self.alone.add(self.of_ranks, self.alone.micros)


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
