"""A sharded toy on a rank: what the bodies of this chapter are made of.

Most clauses are a situation (`programs.law.same_as_alone`). A body here needs what no situation
says: an option, a hook, a look into the traffic. `on_rank` gives it a toy in a scene, with the
calls of programs; `judge_gradients` compares with what one process has after the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from spec_tests.programs import law
from spec_tests.programs.alone import SEED as SEED  # the chapter takes it from here
from spec_tests.programs.calls import spelled
from spec_tests.programs.laws import refusal, traffic
from spec_tests.programs.laws.traffic import REDUCTIONS
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import put_together
from spec_tests.programs.units import units_of as units_of
from spec_tests.programs.ways import WAYS
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.recorder import Log
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS, sum_of_squares

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
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Shard `module` with the function under test; `fully_shard` bottom-up with the options.

    A name like "first+second" shards both in one call.

    Args:
        policy: of `MixedPrecisionPolicy`; a whole model takes its `param_dtype` alone.
    """
    if subject == "fsdp":
        dtypes = {"compute_dtype": policy["param_dtype"]} if policy else {}
        return ctx.impl.fsdp(module, **dtypes, **options)
    if policy is not None:
        options["mp_policy"] = ctx.impl.MixedPrecisionPolicy(**policy)
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


def rows_of(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """The rows that `torch.chunk` gives a rank: none where it makes fewer pieces."""
    return (*tensor.chunk(num_ranks), *[tensor[:0]] * num_ranks)[rank]


def kinds_of(model: nn.Module) -> list[str]:
    """The names of the classes of a model's parameters."""
    return sorted({type(parameter).__name__ for parameter in model.parameters()})


def full_parameters(ctx: Context, model: nn.Module, names: Sequence[str]) -> Named:
    """The full tensors of these names; a wrapper's own prefix does not count."""
    found = ctx.impl.full_parameters(model)
    plain = {name.removeprefix("module."): value for name, value in found.items()}
    return {name: plain[name].detach().clone() for name in names if name in plain}


def on_rank(ctx: Context, subject: str, scene: str) -> OnRank:
    """A toy in a scene, sharded on this rank, with optimizers over its parameters."""
    return WAYS[subject](ctx, subject, scene)


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
    seen = [[(spelled(program[-1:]), of_rank)] for of_rank in found]
    law.judge_values(put_together(seen), subject, situation)


def sharded_toy(ctx: Context, subject: str, toy: str, seed: int = SEED, **options: Any) -> Any:
    """A toy as built with a seed, sharded by its children with these options."""
    return shard(ctx, subject, TOYS[toy].build(seed).to(ctx.device), **options)


def trajectory(ctx: Context, subject: str, toy: str, **options: Any) -> Named:
    """What steps of AdamW in float32 on real-valued data show, and the full weights at the end.

    An output of each step, and of `fully_shard`, whose gradients lie open, the gradients.
    """
    model = sharded_toy(ctx, subject, toy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(1000 + ctx.rank)
    found = {}
    for step in range(4):
        optimizer.zero_grad()
        output = model(torch.randn(3, 6, generator=generator).to(ctx.device).clamp(-5, 5))
        output.square().mean().backward()
        finish(ctx, subject, model)
        if subject == "fully_shard":
            for name, p in model.named_parameters():
                found[f"gradient of {name} {step}"] = p.grad.to_local().clone()
        optimizer.step()
        found[f"output {step}"] = output.detach()
    names = [name for name, _ in TOYS[toy].build(SEED).named_parameters()]
    return found | _weights(ctx, subject, model, names)


def recorded(ctx: Context, rank: OnRank, micro: str) -> Log:
    """What the forward and the backward of a micro-batch send."""
    with ctx.recording() as recorder:
        rank.loss(micro).backward()
        rank.finish_backward()
    return recorder.log()


def second_step(ctx: Context, subject: str, scene: str) -> Log:
    """What forward and backward of a second step send; nothing is read between (rank body)."""
    rank = on_rank(ctx, subject, scene)
    rank.follow("backward 1, zero_grad none")
    return recorded(ctx, rank, "0")


def sent_by(ctx: Context, subject: str, scene: str, *calls: str) -> Log:
    """What the last of these programs sends, after the others, in a scene (rank body)."""
    rank = on_rank(ctx, subject, scene)
    for program in calls:
        with ctx.recording() as recorder:
            rank.follow(program)
    return recorder.log()


def judge_sent(
    logs: Sequence[Log],
    gathered: int,
    reduced: int,
    given: str = "",
    likely: str = "a setting is not read, or something is gathered or reduced twice",
) -> None:
    """Each rank must have gathered and reduced so many elements."""
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        got = (traffic.gathered(log, len(logs)), traffic.reduced(log))
        judge.holds(
            got == (gathered, reduced),
            f"rank {rank}: expected {gathered} elements gathered and {reduced} reduced, got "
            f"{got[0]} and {got[1]}",
            likely=likely,
            given=given,
        )


def judge_messages(logs: Sequence[Log], units: int, likely: str) -> None:
    """A step may have two gathers and one reduction for each unit, or as many from each rank."""
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        gathers = traffic.messages(log, len(logs), *traffic.GATHERS)
        reductions = traffic.messages(log, len(logs), *REDUCTIONS)
        judge.holds(
            gathers <= 2 * units and reductions <= units,
            f"rank {rank}: expected at most {2 * units} gathers and {units} reductions in a step "
            f"for {units} units (a broadcast or reduce per rank is one), got {gathers:g} and "
            f"{reductions:g}",
            likely=likely,
        )


def inputs(rank: int) -> torch.Tensor:
    """The inputs `[4, 6]` of a rank, where a model is no toy: small integers."""
    return TOYS["mlp"].batch(SEED, rank=rank)


def output_of(model: Any, x: torch.Tensor) -> Named:
    """The one output of a model."""
    return {"output": model(x)}


@dataclass(frozen=True)
class Own:
    """A clause's own model. It travels to the ranks, so its functions are those of modules.

    Attributes:
        build: returns it, its parameters small integers.
        call: calls it with inputs; returns the outputs that the loss adds up, by name.
        batch: returns the inputs of a rank.
        units: how it is sharded, see `shard`.
        tracks_input: the input gets a gradient; without one, nothing below a first unit tells that
            its backward is over.
    """

    build: Callable[[], nn.Module]
    call: Callable[[Any, torch.Tensor], Named] = output_of
    batch: Callable[[int], torch.Tensor] = inputs
    units: str | Sequence[str] = "children"
    tracks_input: bool = False


def toy_of(name: str, units: str | Sequence[str] = "children") -> Own:
    """A toy, as a clause's own model."""
    return Own(partial(built, name), batch=partial(_batch, name), units=units)


def built(name: str) -> nn.Module:
    """A toy, as built with the seed of this chapter."""
    return TOYS[name].build(SEED)


def _batch(name: str, rank: int) -> torch.Tensor:
    return TOYS[name].batch(SEED, rank=rank)


def step_of(
    ctx: Context,
    subject: str,
    own: Own,
    method: str = "",
    is_second: bool = False,
    notes_late: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What a step of SGD with a rate of one shows of a clause's own model (rank body).

    "weights" are the full ones after it, "kinds" the classes of parameters between forward and
    backward, "trained" the names of shards with a gradient and "dtypes" the dtypes of these,
    "whole" the names of parameters that are plain and whole after it, "late" an error of the
    backward.

    Args:
        method: is registered as a method beside `forward`.
        is_second: a backward whose gradients are dropped comes before the step.
        notes_late: an error of the backward is noted, and not raised.
        options: of `shard`.
    """
    module = own.build()
    shapes = {name: p.shape for name, p in module.named_parameters()}
    model = shard(ctx, subject, module.to(ctx.device), own.units, **options)
    if method:
        ctx.impl.register_fsdp_forward_method(model, method)
    x = own.batch(ctx.rank).to(ctx.device).requires_grad_(own.tracks_input)
    if is_second:
        _loss(own.call(model, x)).backward()
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outputs = own.call(model, x)
    kinds = kinds_of(model)
    with refusal.caught(Exception if notes_late else ()) as late:
        (ctx.world_size * _loss(outputs)).backward()
    dtypes = {n: str(p.grad.dtype) for n, p in model.named_parameters() if p.grad is not None}
    if not late["error"]:
        finish(ctx, subject, model)
        optimizer.step()
    return {
        "trained": None if subject == "fsdp" else [*dtypes],
        "dtypes": dtypes,
        "late": late["error"],
        "kinds": kinds,
        "output": {name: output.detach() for name, output in outputs.items()},
        "input": {"x": x.grad},
        "whole": [n for n, shape in shapes.items() if _is_whole(model, n, shape)],
        "weights": _weights(ctx, subject, model, [*shapes]),
    }


def _is_whole(model: nn.Module, name: str, shape: torch.Size) -> bool:
    """Whether a parameter has its name behind that of a wrapper, its shape, and is no DTensor."""
    found = [p for n, p in model.named_parameters() if f".{n}".endswith(f".{name}")]
    return [p.shape for p in found] == [shape] and not hasattr(found[0], "placements")


def _loss(outputs: Named) -> Any:
    return sum(map(sum_of_squares, outputs.values()))


def _weights(ctx: Context, subject: str, model: Any, names: Sequence[str]) -> Named:
    if subject == "fsdp":
        return full_parameters(ctx, model, names)
    whole = [(n, getattr(p, "full_tensor", lambda p=p: p)()) for n, p in model.named_parameters()]
    return {name: value.detach().clone() for name, value in whole}


SHOWN = ("output", "input", "weights", "trained")
"""What is judged of a step: outputs, gradients of inputs, weights, and which parameters train."""


def judge_step(
    ranks: Sequence[dict[str, Any]], own: Own, shown: Sequence[str] = SHOWN, given: str = ""
) -> None:
    """What `step_of` found must be what one process finds with the batches of all ranks."""
    __tracebackhide__ = True
    late = next((rank["late"] for rank in ranks if rank["late"]), "")
    judge.holds(
        not late,
        f"expected right gradients, or an error of the forward, got one of the backward: {late}",
        likely="what the loss reaches is not seen: its backward finds weights that were freed",
        given=given,
    )
    plain = own.build()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    batches = [own.batch(rank).requires_grad_(own.tracks_input) for rank in range(len(ranks))]
    outputs = [own.call(plain, x) for x in batches]
    sum(map(_loss, outputs)).backward()
    trained = [name for name, p in plain.named_parameters() if p.grad is not None]
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    after = {name: p.detach() for name, p in plain.named_parameters()}
    summed = {name: old + len(ranks) * (after[name] - old) for name, old in before.items()}
    likely = (
        Hint("the weight from before: no gradient came", before),
        Hint("gradients were summed over ranks and not averaged", summed),
    )
    own_outputs = [{name: y.detach() for name, y in of_rank.items()} for of_rank in outputs]
    of_inputs: Any = [{"x": None if x.grad is None else len(ranks) * x.grad} for x in batches]
    for name, wanted, quantity, hints in (
        ("output", own_outputs, "output", ()),
        ("input", of_inputs, "gradient of the input", ()),
        ("weights", after, "weight after one step", likely),
    ):
        if name in shown:
            found = [rank[name] for rank in ranks]
            judge.tensors(found, wanted, quantity=quantity, hints=hints, given=given)
    said = [rank["trained"] for rank in ranks if rank["trained"] is not None]
    if "trained" in shown:
        judge.equal(said, trained, quantity="parameters with a gradient", given=given)


def steps_as_alone(
    world: World,
    subject: str,
    own: Own,
    *,
    usual: Own | None = None,
    shown: Sequence[str] = SHOWN,
    given: str = "",
    **how: Any,
) -> Any:
    """Judge a step of a clause's own model; return what `step_of` found, None if it was refused.

    Args:
        usual: where `own` may be refused with an error, a model that may not.
        shown: which of `SHOWN` is judged.
        how: of `step_of`.
    """
    __tracebackhide__ = True
    asked: Any = (step_of, subject, own)
    ranks: Any
    if usual is None:
        ranks = world.run(*asked, **how)
    else:
        ordinary = (step_of, subject, usual)
        ranks = refusal.answer_or_refusal(world, *asked, ordinary=ordinary, **how)
    if ranks is not None:
        judge_step(ranks, own, shown, given)
    return ranks
