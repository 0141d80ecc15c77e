"""One rank's view of a sharded toy: what the bodies of this chapter are made of.

Two shapes are judged by the same bodies. `fully_shard` is called on units bottom-up and then on the
model, and its parameters are DTensors. `fsdp` takes the whole model, says nothing about how
parameters are represented, and has `finish_gradient_synchronization` after each backward. What
both have is a forward, a backward, an optimizer over `parameters()`, and `full_parameters`; so
gradients are read as what one step of SGD with a learning rate of one subtracts. The toys hold
integers: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.programs import calls as programs
from spec_tests.programs import law
from spec_tests.programs.laws import wrapped
from spec_tests.programs.laws.traffic import REDUCTIONS
from spec_tests.programs.laws.wrapped import SEED as SEED  # the chapter takes it from here
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import put_together
from spec_tests.programs.scene import Scene
from spec_tests.programs.units import having as having
from spec_tests.programs.units import units_of as units_of
from spec_tests.programs.ways import WAYS
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.recorder import Log
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS

RATE = 2.0**-16
"""Learning rate of training: weights move by ten times what rounding may move them, or more."""

WHOLE = "plain and whole"
"""The kind of a parameter that is not sharded, see `kind_of`."""

FULLY_SHARD = ("fully_shard",)
BOTH = ("fully_shard", "fsdp")


def divisible(subject: str, toy: str) -> str:
    """`toy` for `fully_shard`; for `fsdp` one whose rows divide: others it may refuse."""
    return toy if subject == "fully_shard" else "even"


def numel(toy: str, *names: str) -> int:
    """Elements of a toy's parameters: of all, or of those named or in the modules named."""
    named = dict(TOYS[toy].build(7).named_parameters())
    below = tuple(f"{name}." for name in names)
    chosen = [n for n in named if not names or n in names or n.startswith(below)]
    return sum(named[name].numel() for name in chosen)


def shard(
    ctx: Context,
    subject: str,
    module: nn.Module,
    units: str | Sequence[str] = "children",
    **options: Any,
) -> nn.Module:
    """Shard `module` with the function under test; `fully_shard` bottom-up with the options.

    A name like "first+second" shards both in one call.
    """
    if subject == "fsdp":
        return ctx.impl.fsdp(module, **options)
    names = units_of(module, units) if isinstance(units, str) else units
    for name in names:
        parts = [module.get_submodule(part) for part in name.split("+")]
        ctx.impl.fully_shard(parts if len(parts) > 1 else parts[0], **options)
    ctx.impl.fully_shard(module, **options)
    return module


def finish(ctx: Context, subject: str, model: nn.Module) -> None:
    """End a backward pass of the whole-model shape."""
    if subject == "fsdp":
        ctx.impl.finish_gradient_synchronization(model)


def of_integers(module: nn.Module) -> Any:
    """The module, its parameters small integers that are not zero: sums are exact."""
    for number, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel()).add(number).remainder(5) - 2.5
        parameter.data.copy_((2 * values).view(parameter.shape))
    return module


def about(tensor: torch.Tensor | None) -> dict[str, Any]:
    """What a parameter or gradient says about itself, as plain data."""
    from torch.distributed.tensor import DTensor  # half a second, which only ranks need

    if tensor is None:
        return {}
    found: dict[str, Any] = {
        "is a Parameter": isinstance(tensor, nn.Parameter),
        "is a DTensor": isinstance(tensor, DTensor),
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
    }
    if isinstance(tensor, DTensor):
        found["placements"] = str(tensor.placements)
        found["mesh"] = tensor.device_mesh.mesh.tolist()
        found["local shape"] = tuple(tensor.to_local().shape)
    return found


def kind_of(parameter: torch.Tensor, shape: torch.Size) -> str:
    """`WHOLE`, or what a parameter that had this shape is instead."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor) and parameter.shape == shape:
        return WHOLE
    return f"{type(parameter).__name__} of shape {tuple(parameter.shape)}"


def says_the_same(
    seen: Mapping[str, Any], wanted: Mapping[str, Any], keys: Iterable[str], what: str, given: str
) -> None:
    """A tensor must say of itself what is wanted; keys of `about`."""
    __tracebackhide__ = True
    wrong = [key for key in keys if seen.get(key) != wanted.get(key)]
    judge.holds(
        not wrong,
        f"{what}: expected { ({k: wanted.get(k) for k in wrong}) }, got "
        f"{ ({k: seen.get(k) for k in wrong}) }",
        given=given,
    )


def full_parameters(ctx: Context, model: nn.Module, names: Sequence[str]) -> Named:
    """The full tensors of these names; a wrapper's own prefix does not count."""
    found = ctx.impl.full_parameters(model)
    plain = {name.removeprefix("module."): value for name, value in found.items()}
    return {name: plain[name].detach().clone() for name in names if name in plain}


def on_rank(ctx: Context, subject: str, scene: str) -> OnRank:
    """A toy in a scene, sharded on this rank, with optimizers over its parameters."""
    return WAYS[subject](ctx, subject, Scene.of(scene))


def gradients_as_after(
    world: World,
    subject: str,
    situation: str,
    body: Callable[..., Gradients],
    *args: Any,
) -> None:
    """What a body returns must be the gradients that one process has after the situation's call.

    Args:
        situation: a scene and one call.
        body: called with (ctx, subject, scene, *args).
    """
    __tracebackhide__ = True
    scene, program = law.read(situation)
    ranks = world.run(body, subject, str(scene), *args)
    judge.SITUATION.get().given = ", ".join((str(scene), *map(str, args)))
    seen = [[(programs.spelled(program), found)] for found in ranks]
    law.judge_values(put_together(seen), subject, situation)


class Sharded(wrapped.WrappedToy):
    """A toy, sharded, with an optimizer over what its `parameters()` are afterwards.

    All ranks build the toy with one seed, as the contract wants it.
    """

    def __init__(
        self,
        ctx: Context,
        subject: str,
        toy: str,
        seed: int = SEED,
        *,
        units: str | Sequence[str] = "children",
        dtype: torch.dtype | None = None,
        frozen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(ctx, toy, seed, seed, dtype)
        self.subject = subject
        self.names = [name for name, _ in self.module.named_parameters()]
        for name in frozen:
            self.module.get_parameter(name).requires_grad_(False)
        self.wrapped: Any = self.wrap(units, **options)
        self.held: list[Any] = list(self.wrapped.parameters())
        self.reduces, self.keeps = True, False
        # foreach, the default on a GPU, takes no plain tensors beside DTensors.
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=RATE, foreach=False)

    def wrap(self, units: str | Sequence[str], **options: Any) -> Any:
        """Shard the toy."""
        return shard(self.ctx, self.subject, self.module, units, **options)

    def recorded(self, micro: int = 0, **flags: Any) -> tuple[Log, Log]:
        """What the forward and what the backward of a micro-batch send."""
        with self.ctx.recording() as forward:
            loss = self.loss(micro, **flags)
        with self.ctx.recording() as backward:
            loss.backward()
        return forward.log(), backward.log()

    def accumulate(self, micro: int = 0, **flags: Any) -> None:
        """Forward and backward of a micro-batch whose gradients stay on this rank."""
        self.synchronise(False)
        self.loss(micro, **flags).backward()
        self.synchronise(True)

    def synchronise(self, flag: bool) -> None:
        """Whether the next backward reduces; nothing is called where that is so already."""
        if flag != self.reduces:
            self.wrapped.set_requires_gradient_sync(flag)
        self.reduces = flag

    def keep(self, flag: bool) -> None:
        """Whether full weights stay after a backward, likewise."""
        if flag != self.keeps:
            self.wrapped.set_reshard_after_backward(not flag)
        self.keeps = flag

    def foreach(self) -> None:
        """Have an optimizer that writes to many tensors in one call."""
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=RATE, foreach=True)

    def last(self, flag: bool) -> None:
        """Whether the next backward is the last of its window."""
        self.wrapped.set_is_last_backward(flag)

    def unshard_all(self, **options: Any) -> None:
        """Gather every unit by hand."""
        for part in having(self.module, "unshard"):
            part.unshard(**options)

    def interrupted(self, layer: str, micro: int) -> torch.Tensor:
        """The loss of a micro-batch whose backward raises AttributeError at that layer's output."""
        outputs: list[Any] = []
        handle = self.module.get_submodule(layer).register_forward_hook(
            lambda module, args, output: outputs.append(output)
        )
        loss = self.loss(micro)
        handle.remove()
        outputs[0].register_hook(lambda gradient: gradient.nothing)
        return loss

    def infer(self, micro: int) -> None:
        """A forward in inference mode, whose tensors take no part in autograd."""
        with torch.inference_mode():
            self.loss(micro)

    def finish(self) -> None:
        """End a backward pass of the whole-model shape."""
        finish(self.ctx, self.subject, self.wrapped)

    def full(self) -> Named:
        """Full parameters by the plain model's names."""
        return full_parameters(self.ctx, self.wrapped, self.names)

    def weights(self) -> Named:
        """The same from the shards: `full_parameters`, or a load, may free what would be stale."""
        shards = zip(self.names, self.held, strict=True)
        return {name: shard.full_tensor().detach().clone() for name, shard in shards}

    def gradients(self) -> Gradients:
        """The gradients, read from a step of SGD; zero where there are none."""
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0
        before = self.full()
        self.optimizer.step()
        after = self.full()
        return {name: before[name] - after[name] for name in before}

    def gather(self) -> None:
        """Note the gradients as gathered from their shards."""
        self.noted = self.whole_gradients()

    def shards(self) -> dict[str, Any]:
        """The parameters as `fully_shard` left them: DTensors, by name."""
        return dict(self.module.named_parameters())

    def local_gradients(self) -> dict[str, torch.Tensor | None]:
        """This rank's rows of each gradient, None where there is none."""
        return {
            name: None if p.grad is None else p.grad.to_local().detach().clone()
            for name, p in self.shards().items()
        }

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients, gathered from all ranks, None where there is none."""
        return {
            name: None if p.grad is None else p.grad.full_tensor().clone()
            for name, p in self.shards().items()
        }


def gradients_sent(log: Log, toy: str) -> int:
    """Elements in reductions that could hold a gradient of the toy; smaller ones are flags."""
    least = min(parameter.numel() for parameter in TOYS[toy].build(SEED).parameters())
    events = log.collectives(*REDUCTIONS)
    return sum(event.numel for event in events if event.numel >= least)


def gradients_after(ctx, subject, toy, seed, calls, **options):
    """Gradients of a sharded toy after these calls, read from a step of SGD."""
    return Sharded(ctx, subject, toy, seed, **options).gradients_after(calls)


def mean_gradients(
    world: World, subject: str, toy: str, calls: str, *, ordinary: str = "", **law: Any
) -> None:
    """After the calls all ranks hold the mean gradient, or refused; see `laws.wrapped`.

    Args:
        ordinary: calls on toy 'even' that no implementation may refuse.
    """
    __tracebackhide__ = True
    usual = (gradients_after, subject, "even", SEED, ordinary) if ordinary else ()
    law = {"absent_is_zero": True, "ordinary": usual, **law}
    wrapped.gradients(world, gradients_after, subject, toy, calls, **law)
