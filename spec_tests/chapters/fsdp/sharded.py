"""A sharded toy on a rank: what the bodies of this chapter are made of.

Most clauses are a situation (`programs.law.same_as_alone`). A body here needs what no situation
says: an option, a hook, a look into the traffic. `on_rank` gives it a toy in a scene, with the
calls of programs; `judge_gradients` compares with what one process has after the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.programs import calls as programs
from spec_tests.programs import law
from spec_tests.programs.alone import SEED as SEED  # the chapter takes it from here
from spec_tests.programs.laws import refusal
from spec_tests.programs.laws.traffic import REDUCTIONS
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import put_together
from spec_tests.programs.scene import Scene
from spec_tests.programs.units import units_of as units_of
from spec_tests.programs.ways import WAYS
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.recorder import Log
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS, sum_of_squares

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
    may_refuse: bool = False,
) -> None:
    """What a body returns must be the gradients that the situation shows at its end.

    Args:
        situation: a scene, and calls of which the last alone shows something.
        body: called with (ctx, subject, scene, *args).
        may_refuse: an error is right as well.
    """
    __tracebackhide__ = True
    asked = (body, subject, str(law.read(situation)[0]), *args)
    ranks = refusal.answer_or_refusal(world, *asked) if may_refuse else world.run(*asked)
    if ranks is not None:
        judge_gradients(ranks, subject, situation, given=", ".join(map(str, asked[2:])))


def judge_gradients(
    found: Sequence[Gradients], subject: str, situation: str, *, given: str = ""
) -> None:
    """Each rank must hold the gradients that the situation shows at its end."""
    __tracebackhide__ = True
    judge.SITUATION.get().given = given or situation
    _, program = law.read(situation)
    seen = [[(programs.spelled(program[-1:]), of_rank)] for of_rank in found]
    law.judge_values(put_together(seen), subject, situation)


def sharded_toy(ctx: Context, subject: str, toy: str, seed: int = SEED, **options: Any) -> Any:
    """A toy as built with a seed, sharded by its children with these options."""
    return shard(ctx, subject, TOYS[toy].build(seed).to(ctx.device), **options)


def loss_of(ctx: Context, model: Any, toy: str, micro: int = 0, seed: int = SEED) -> torch.Tensor:
    """The loss of this rank's micro-batch; the mean over ranks of its gradients is a plain sum."""
    batch = TOYS[toy].batch(seed, rank=ctx.rank, micro=micro).to(ctx.device)
    return ctx.world_size * sum_of_squares(model(batch))


def recorded(ctx: Context, rank: OnRank, micro: str) -> tuple[Log, Log]:
    """What the forward and what the backward of a micro-batch send."""
    with ctx.recording() as forward:
        loss = rank.loss(micro)
    with ctx.recording() as backward:
        loss.backward()
    return forward.log(), backward.log()


def gradients_sent(log: Log, toy: str) -> int:
    """Elements in reductions that could hold a gradient of the toy; smaller ones are flags."""
    least = min(parameter.numel() for parameter in TOYS[toy].build(SEED).parameters())
    events = log.collectives(*REDUCTIONS)
    return sum(event.numel for event in events if event.numel >= least)
