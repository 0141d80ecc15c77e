"""The same calls on a rank, for every way to divide training.

A subclass (`ways.py`) says how a toy is wrapped, how a micro-batch stays on its rank, how a
backward ends, and where gradients and weights are read. The calls are written once, in the base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.programs.alone import (
    LARGE,
    ORDERS,
    SEED,
    first_buffer,
    flags_of,
    next_buffer,
    one_of,
)
from spec_tests.programs.machine import Machine
from spec_tests.programs.outputs import OUTPUTS
from spec_tests.programs.pieces import Piece, exact
from spec_tests.programs.planted import PlantedError, failing
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.toys import TOYS, sum_of_squares


class OnRank(Machine):
    """One rank's toy in a scene, and what a program does to it.

    The loss of each micro-batch is the number of ranks times `sum_of_squares`, so that the mean
    over ranks is a sum of integers.

    Attributes:
        module: the toy; `wrapped` is what the function under test made of it.
        held: the parameters that an optimizer is built over, in the order of `names`.
        records: the last forward without gradients has recorded a graph.
    """

    def __init__(self, ctx: Context, subject: str, scene: Scene) -> None:
        self.ctx, self.subject, self.scene = ctx, subject, scene
        self.toy = TOYS[scene["toy"][0]]
        plain = self._built()
        self.names = [name for name, _ in plain.named_parameters()]
        parameters = list(plain.parameters())
        for number in scene["trained"]:
            parameters[number].requires_grad_(False)
        self.group = ctx.split(scene["group"]) if scene["group"] else None
        self.peers = scene.peers(ctx.world_size, ctx.rank)
        self.module = plain
        self._prepare()
        if scene.is_compiled:
            torch._dynamo.reset()  # ranks are used again
        if scene.word("entrance") == "compiled":
            for part in leaves(plain):
                part.compile(backend="aot_eager")
        self.wrapped: Any = self.wrap()
        self.called = self.wrapped
        if scene.word("entrance") == "compiled-whole":
            self.called = torch.compile(self.wrapped, backend="aot_eager")
        self.hold()
        self.trained = [parameter.requires_grad for parameter in self.held]
        for part in (self.wrapped, self.module):
            if isinstance(part, nn.Module):  # courses' wrappers are none
                part.train(scene["mode"])
        self.buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        self.losses: Any = None
        self.records = False
        self.saved: Any = None

    def _built(self) -> nn.Module:
        return self.toy.build(SEED).to(self.ctx.device, self.scene.weights)

    def _prepare(self) -> None:
        """Let the toy's forward give the scene's output, recomputed if the scene says so."""
        give = OUTPUTS[self.scene.word("output")][0]
        inner = self._buffered() if self.scene["buffers"] else self.module.forward
        self.module.forward = lambda *args, **kw: give(inner(*args, **kw))
        if self.scene.word("entrance") == "recomputed":
            for part in leaves(self.module):
                part.forward = _recomputing(part.forward)  # type: ignore[method-assign]  # of one object
        if self.scene.word("entrance") in ("called-again", "called-again-reentrant"):
            is_reentrant = self.scene.word("entrance") == "called-again-reentrant"
            for part in leaves(self.module):
                part.__class__ = _called_again(type(part), is_reentrant)  # type: ignore[arg-type]  # hashable

    def _buffered(self) -> Callable[..., torch.Tensor]:
        """Return a forward that adds a buffer to its output, and changes it in training."""
        module, inner = self.module, self.module.forward
        is_integer = self.scene["buffers"] == "integers"
        first = torch.tensor(first_buffer(self.ctx.rank))
        module.register_buffer("seen", first.long() if is_integer else first)
        if is_integer:
            module.register_buffer("odd", first % 2 == 1)

        def forward(x: torch.Tensor, *flags: str, **named: str) -> torch.Tensor:
            y: torch.Tensor = inner(x, *flags, **named)
            if not torch.is_grad_enabled():
                return y
            seen: Any = module.seen
            y = y + seen.to(y.dtype)
            if is_integer:
                y = y + module.odd.to(y.dtype)  # type: ignore[operator]  # a buffer
            if module.training:
                with torch.no_grad():
                    found = next_buffer(seen, x)
                    if self.scene["buffers"] == "by assignment":
                        module.seen = found
                    else:
                        seen.copy_(found)
                    if is_integer:
                        module.odd.copy_(found % 2 == 1)  # type: ignore[union-attr, operator]  # a buffer
            return y

        return forward

    # --- what a way to divide decides

    def wrap(self) -> Any:
        """Return what the function under test makes of the toy."""
        raise AssertionError("a subclass wraps")

    def parameters(self) -> list[Any]:
        """Return what an optimizer is built over, in the order of `names` as far as it has them."""
        if not isinstance(self.wrapped, nn.Module):  # courses' wrappers are none
            return list(self.wrapped.parameters())
        named = {n.removeprefix("module."): p for n, p in self.wrapped.named_parameters()}
        own = [named.pop(name) for name in self.names if name in named]
        return [*own, *named.values()]

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Within, a micro-batch stays on this rank."""
        with self.ctx.impl.no_sync(self.wrapped):
            yield

    def finish_backward(self) -> None:
        self.ctx.impl.finish_gradient_synchronization(self.wrapped)

    def named(self) -> list[tuple[str, Any]]:
        """Return what is held, by the plain model's names; what a wrapper adds has none."""
        return [*zip(self.names, self.held, strict=False)]

    def gradients(self) -> Gradients:
        """Return the gradients, by the plain model's names."""
        return {n: None if p.grad is None else copy_of(p.grad) for n, p in self.named()}

    def full(self) -> Named:
        """Return the full weights, by the plain model's names."""
        return {n: copy_of(p) for n, p in self.named()}

    # --- the optimizers

    def hold(self) -> None:
        """Build the optimizers over the parameters of now."""
        self.held = self.parameters()
        make, number = self.scene["optimizer"]
        self.optimizers = [
            make([{"params": part[:1]}, {"params": part[1:]}] if part[1:] else part)
            for part in (self.held[n::number] for n in range(number))
        ]

    def step(self) -> Named:
        """Turn the sign of every trained weight, through the optimizers."""
        return self._step(self.held, self.optimizers)

    def step_one(self, which: str) -> Named:
        """The same with the first optimizer and its parameters alone, or with the others."""
        number = len(self.optimizers)
        if which == "first":
            return self._step(self.held[::number], self.optimizers[:1])
        others = [p for n, p in enumerate(self.held) if n % number]
        return self._step(others, self.optimizers[1:])

    def _step(self, held: list[Any], optimizers: list[torch.optim.Optimizer]) -> Named:
        for parameter in self.held:
            parameter.grad = None
        for parameter in held:
            if parameter.requires_grad:
                parameter.grad = 2 * parameter.detach()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.full()

    # --- the calls

    def output(self, micro: str) -> torch.Tensor:
        """Return the model's output for a micro-batch."""
        batch = self.toy.batch(SEED, rank=self.ctx.rank, micro=int(micro))
        inputs = batch.to(self.ctx.device, self.scene.weights)
        flags = flags_of(self.scene, self.ctx.rank, micro)
        model, read = self.called, OUTPUTS[self.scene.word("output")][1]
        if self.scene.word("entrance") == "method":
            model = self.wrapped.compute
        if self.scene.word("entrance") == "keyword":
            named = dict(zip(("use",), flags, strict=False))
            return read(model(x=inputs, **named))  # type: ignore[no-any-return]  # a tensor
        if self.scene.word("entrance") == "all-again":
            return _recomputing(lambda *args: _times_one(read(model(*args))))(inputs, *flags)  # type: ignore[no-any-return]  # a tensor
        return read(model(inputs, *flags))  # type: ignore[no-any-return]  # a tensor

    def loss(self, *micros: str) -> Any:
        """Return the sum of the losses of these micro-batches."""
        return len(self.peers) * sum(sum_of_squares(self.output(micro)) for micro in micros)

    def backward(self, *micros: str) -> Gradients:
        self.loss(*micros).backward()
        self.finish_backward()
        return self.gradients()

    both = backward

    def beside(self, micro: str) -> Gradients:
        other = type(self)(self.ctx, self.subject, Scene.of("even"))
        (self.loss(micro) + other.loss(micro)).backward()
        other.finish_backward()
        self.finish_backward()
        return self.gradients() | {f"other {n}": g for n, g in other.gradients().items()}

    def begun(self, micro: str) -> None:
        self.loss(micro).backward()

    def several(self, one: str, other: str) -> Gradients:
        self.begun(one)
        return self.backward(other)

    def twice(self, micro: str) -> Gradients:
        loss = self.loss(micro)
        loss.backward(retain_graph=True)
        loss.backward()
        self.finish_backward()
        return self.gradients()

    def accumulate(self, micro: str) -> None:
        with self.quietly():
            self.loss(micro).backward()

    locally = accumulate

    def local(self) -> Gradients:
        return self.gradients()

    def nested(self, one: str, other: str) -> None:
        with self.quietly():
            with contextlib.suppress(PlantedError), self.quietly():
                self.loss(one).backward()
                if int(one) % 2:
                    raise PlantedError
            self.loss(other).backward()

    def prepared(self, one: str, other: str) -> None:
        windows = [self.ctx.impl.no_sync(self.wrapped) for _ in range(2)]
        for window, micro in zip(windows, (one, other), strict=True):
            with window:
                self.loss(micro).backward()

    def leave(self) -> None:
        with contextlib.suppress(PlantedError), self.quietly():
            raise PlantedError

    def forward(self, micro: str) -> None:
        self.losses = self.loss(micro)

    def pending(self) -> Gradients:
        self.losses.backward()
        self.losses = None
        self.finish_backward()
        return self.gradients()

    resumed = pending

    def finish(self) -> Gradients:
        self.finish_backward()
        return self.gradients()

    def zero_grad(self, how: str) -> None:
        if how == "of-the-model":
            self.wrapped.zero_grad()
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")

    def clip(self, order: str) -> Gradients:
        """Clip to half the norm, and show it beside what that leaves."""
        clip = self.ctx.impl.clip_grad_norm_
        norm = clip(self.held, LARGE, ORDERS[order])
        clip(self.held, float(norm) / 2, ORDERS[order])
        found = {"norm": exact(norm)} | self.gradients()
        self.zero_grad("none")
        return found

    @torch.no_grad()
    def evaluate(self, micro: str) -> Named:
        found = self.output(micro)
        self.records = found.requires_grad
        return {"output": exact(found)}

    def evaluate_apart(self, micro: str) -> Named:
        self.wrapped.eval()
        found = self.evaluate(micro)
        self.wrapped.train(self.scene["mode"])
        return found

    def aside(self, micro: str) -> Named:
        with self.quietly():
            found = self.evaluate(micro)
            self.loss(micro).backward()
        return found

    def infer(self, micro: str) -> Named:
        with torch.inference_mode():
            found = self.output(micro)
        self.records = found.requires_grad
        return {"output": exact(found)}

    def record(self, micro: str) -> Named:
        return {"output": exact(self.output(micro))}

    def fails(self, micro: str, layer: str) -> None:
        called = [part for name, part in leaves_by_name(self.module) if "unused" not in name]
        with failing(chosen(called or [self.module], layer)):
            self.loss(micro)

    def fails_backward(self, micro: str, layer: str) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise PlantedError

        outputs: list[torch.Tensor] = []
        handles = [
            part.register_forward_hook(lambda part, args, y: outputs.append(y))
            for part in leaves(self.module)
        ]
        loss = self.loss(micro)
        for handle in handles:
            handle.remove()
        reached = [y for y in outputs if y.requires_grad]
        chosen(reached or [loss], layer).register_hook(fail)
        with contextlib.suppress(PlantedError):
            loss.backward()
        self.ctx.was_interrupted()

    @torch.no_grad()
    def write(self, where: str) -> None:
        for number, parameter in enumerate(self.held):
            if where == "local-tensors":
                (parameter.to_local() if hasattr(parameter, "placements") else parameter).neg_()
            elif where == "parameters" or number == one_of(self.held):
                parameter.neg_()

    def save(self) -> None:
        state = self.module.state_dict()
        self.saved = {name: value.detach().clone() for name, value in state.items()}

    def load(self, assigns: str) -> Named:
        state = {name: value.clone() for name, value in self.saved.items()}
        is_assigned = assigns != "copied"
        parts = [{n: state[n]} for n in state] if assigns == "in-parts" else [state]
        for part in parts:
            self.module.load_state_dict(part, assign=is_assigned, strict=part is state)
        if assigns == "in-parts":
            self.module.state_dict()  # shows the shards: those that were loaded
        if is_assigned:
            self.hold()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.full()

    def rest(self) -> None:
        """Bring settings and buffers back to those of the scene, and gradients to None."""
        self.losses = self.saved = None
        self.zero_grad("none")
        for name, value in self.buffers.items():
            self.module.get_buffer(name).copy_(value)
        for parameter, trains in zip(self.held, self.trained, strict=False):
            if parameter.requires_grad is not trains:
                parameter.requires_grad_(trains)

    def another_lives(self) -> None:
        """Another model is wrapped, trained for a step and dropped."""
        other = type(self)(self.ctx, self.subject, Scene.of("even"))
        other.backward("3")
        other.step()


def _times_one(y: torch.Tensor) -> torch.Tensor:
    """Return the same; a backward needs a tensor of its dtype."""
    return y * torch.ones_like(y)


def chosen(things: Sequence[Any], which: str) -> Any:
    """Return the first, the last, or the one in the middle."""
    return things[{"first": 0, "middle": len(things) // 2, "last": -1}[which]]


def copy_of(tensor: Any) -> Any:
    """Return a copy of a parameter or gradient, or of this rank's piece of it."""
    return Piece.of(tensor) if hasattr(tensor, "placements") else exact(tensor)


def leaves_by_name(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that have no children, below the module."""
    return [(n, part) for n, part in module.named_modules() if n and not [*part.children()]]


def leaves(module: nn.Module) -> list[nn.Module]:
    """Return the same without their names."""
    return [part for _, part in leaves_by_name(module)]


@cache
def _called_again(kind: type[nn.Module], is_reentrant: bool) -> type[nn.Module]:
    """Return the class whose call is recomputed in backward, with its hooks."""
    call = _recomputing(kind.__call__, is_reentrant)
    return type(f"Again{kind.__name__}", (kind,), {"__call__": call})


def _recomputing(forward: Callable[..., Any], is_reentrant: bool = False) -> Callable[..., Any]:
    def recomputing(*args: Any) -> Any:
        # The reentrant form loses the gradients of weights whose inputs need none.
        reaches = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        return checkpoint(forward, *args, use_reentrant=is_reentrant and reaches)

    return recomputing
