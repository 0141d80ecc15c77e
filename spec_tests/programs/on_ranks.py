"""The same calls on a rank, for every way to divide training.

A subclass (`ways.py`) says how a toy is wrapped, how a micro-batch stays on its rank, how a
backward ends, and where gradients and weights are read. The calls are written once, in the base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from spec_tests.programs.laws import compiled
from spec_tests.programs.machine import Training
from spec_tests.programs.outputs import OUTPUTS
from spec_tests.programs.pieces import Piece, exact
from spec_tests.programs.planted import PlantedError, fail, failing
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.toys import TOYS, sum_of_squares


class OnRank(Training):
    """One rank's toy in a scene, and what a program does to it.

    The loss of each micro-batch is the number of ranks times `sum_of_squares`, so that the mean
    over ranks is a sum of integers.

    Args:
        compiling: how it is compiled, see `laws.compiled.wrapped`.

    Attributes:
        module: the toy; `wrapped` is what the function under test made of it.
        held: the parameters that an optimizer is built over, in the order of `names`.
        records: the last forward without gradients has recorded a graph.
    """

    def __init__(self, ctx: Context, subject: str, scene: Scene | str, **compiling: Any) -> None:
        self.ctx, self.subject, self.scene = ctx, subject, (scene := Scene.of(scene))
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
            is_whole = scene.word("entrance") == "compiled-whole"
            compiling["how"] = "whole aot_eager" if is_whole else "before aot_eager"
            compiling["parts"] = [*leaves(plain)]
        self.wrapped, self.called = compiled.wrapped(plain, self.wrap, **compiling)
        self.hold()
        self.trained = [parameter.requires_grad for parameter in self.held]
        for part in (self.wrapped, self.module):
            if isinstance(part, nn.Module):  # courses' wrappers are none
                part.train(scene["mode"])
        self.buffers = {name: value.clone() for name, value in self.module.named_buffers()}
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
            for part in leaves(self.module).values():
                part.forward = _recomputing(part.forward)  # type: ignore[method-assign]  # of one object
        if self.scene.word("entrance") in ("called-again", "called-again-reentrant"):
            is_reentrant = self.scene.word("entrance") == "called-again-reentrant"
            for part in leaves(self.module).values():
                part.__class__ = _called_again(type(part), is_reentrant)  # type: ignore[arg-type]  # hashable

    def _buffered(self) -> Callable[..., torch.Tensor]:
        """Return a forward that adds a buffer to its output, and changes it in training."""
        module, inner = self.module, self.module.forward
        made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"seen": lambda value: value}
        first = torch.tensor(first_buffer(self.ctx.rank))
        if self.scene["buffers"] == "integers":
            made, first = made | {"odd": lambda value: value % 2 == 1}, first.long()
        for name, make in made.items():
            module.register_buffer(name, make(first))

        def forward(x: torch.Tensor, *flags: str, **named: str) -> torch.Tensor:
            y: torch.Tensor = inner(x, *flags, **named)
            if not torch.is_grad_enabled():
                return y
            for name in made:
                y = y + getattr(module, name).to(y.dtype)
            if module.training:
                with torch.no_grad():
                    value = next_buffer(module.seen, x)
                    for name, make in made.items():
                        if self.scene["buffers"] == "by assignment":
                            setattr(module, name, make(value))
                        else:
                            getattr(module, name).copy_(make(value))
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

    def quietly(self) -> AbstractContextManager[Any]:
        """Return a context within which a micro-batch stays on this rank."""
        return self.ctx.impl.no_sync(self.wrapped)  # type: ignore[no-any-return]  # such a context

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

    def _step(self, updates: Callable[[int], bool]) -> Named:
        """Turn the sign of these weights, as far as they are trained, through the optimizers."""
        for number, parameter in enumerate(self.held):
            is_due = updates(number) and parameter.requires_grad
            parameter.grad = 2 * parameter.detach() if is_due else None
        for number, optimizer in enumerate(self.optimizers):
            if updates(number):
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
        entrance, read = self.scene.word("entrance"), OUTPUTS[self.scene.word("output")][1]
        model = self.wrapped.compute if entrance == "method" else self.called
        named = dict(zip(("use",), flags, strict=False))
        found: torch.Tensor
        if entrance == "keyword":
            found = read(model(x=inputs, **named))
        elif entrance == "all-again":
            found = _recomputing(lambda *args: _times_one(read(model(*args))))(inputs, *flags)
        else:
            found = read(model(inputs, *flags))
        return found

    def loss(self, *micros: str) -> Any:
        """Return the sum of the losses of these micro-batches."""
        return len(self.peers) * sum(sum_of_squares(self.output(micro)) for micro in micros)

    def beside(self, micro: str) -> Gradients:
        other = type(self)(self.ctx, self.subject, "even")
        (self.loss(micro) + other.loss(micro)).backward()
        other.finish_backward()
        self.finish_backward()
        return self.gradients() | {f"other {n}": g for n, g in other.gradients().items()}

    def amid(self, micro: str) -> Gradients:
        with type(self)(self.ctx, self.subject, "even").quietly():
            return self.backward(micro)

    def local(self) -> Gradients:
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

    def infer(self, micro: str) -> Named:
        with torch.inference_mode():
            found = self.output(micro)
        self.records = found.requires_grad
        return {"output": exact(found)}

    def record(self, micro: str) -> Named:
        return {"output": exact(self.output(micro))}

    def fails(self, micro: str, layer: str) -> None:
        called = [part for name, part in leaves(self.module).items() if "unused" not in name]
        with failing(chosen(called or [self.module], layer)):
            self.loss(micro)

    def fails_backward(self, micro: str, layer: str) -> None:
        outputs: list[torch.Tensor] = []
        handles = [
            part.register_forward_hook(lambda part, args, y: outputs.append(y))
            for part in leaves(self.module).values()
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
        other = type(self)(self.ctx, self.subject, "even")
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


def leaves(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have no children, below the module, by name."""
    return {n: part for n, part in module.named_modules() if n and not [*part.children()]}


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
