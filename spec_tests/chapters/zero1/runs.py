"""One training run in small, sharded in a rank and plain in the parent: the same code for both.

A script is a module-level function that takes a `Run`, trains, and returns what it saw. `in_ranks`
follows it with the implementation's sharded optimizer, `alone` with the plain optimizer, which is
the oracle. Gradients "arrive already averaged", so they are not computed but dealt: integers that
depend on seed, step and name, the same on all ranks unless a script asks for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.programs.laws import footprint, refusal
from spec_tests.rig import judge
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance, exact, rounding
from spec_tests.rig.ranks.errors import RankDied, RankHung
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS, integers

Make = Callable[..., torch.optim.Optimizer]
Groups = Callable[[dict[str, nn.Parameter]], Any]
Script = Callable[..., Any]


class Counting(torch.optim.SGD):
    """SGD whose groups count its steps, from each of which the rate is half of the one before."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float = 1.0) -> None:  # type: ignore[override]  # no loss
        """Update; `factor` multiplies the rate."""
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = factor * group["lr"] / 2 ** group["steps"]
                    parameter.add_(parameter.grad, alpha=-rate)


class Declared(Counting):
    """The same, and the number of steps is there from the beginning."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["steps"] = 0


class AsIs(torch.optim.SGD):
    """SGD as an exercise has one write it: `step` calls the closure in the caller's grad mode."""

    def step(self, closure: Any = None) -> Any:
        """Evaluate, then update."""
        loss = None if closure is None else closure()
        super().step()
        return loss


# Powers of two: with integer gradients every step of SGD is exact, however it is divided.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0**-6}),
    "momentum": (torch.optim.SGD, {"lr": 2.0**-6, "momentum": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.5}),
    "counting": (Counting, {"lr": 0.5}),
    "declared": (Declared, {"lr": 0.5}),
    "as-is": (AsIs, {"lr": 2.0**-6}),
}
USUAL = ("sgd", "momentum", "adam", "adamw")
TOY, SEED = "ragged", 7
DIVISIBLE = "even"
"""Two, three and four ranks divide the elements of each of its parameters."""
WIDTH, DEPTH = 48, 8  # two, three and four ranks divide the width


def all_in_one(parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """The parameters without groups, as most users pass them."""
    return list(parameters.values())


class Run:
    """A toy with its optimizer.

    Args:
        make: called like an optimizer's class, with that class as second argument.
        groups: the parameters, by name, to what the optimizer gets.
    """

    def __init__(
        self,
        make: Make,
        *,
        toy: str = TOY,
        optimizer: str = "adamw",
        groups: Groups = all_in_one,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.toy = toy
        self.module = TOYS[toy].build(SEED).to(dtype)
        self.parameters = dict(self.module.named_parameters())
        kind, usual = OPTIMIZERS[optimizer]
        self.optimizer = make(groups(self.parameters), kind, **{**usual, **options})
        self.seen: oracle.Named = {}

    def deal(self, number: int, *, absent: Sequence[str] = (), add: float = 0.0) -> None:
        """Give every trainable parameter its gradient of step `number`; `absent` ones get None."""
        for index, (name, parameter) in enumerate(self.parameters.items()):
            parameter.grad = None
            if parameter.requires_grad and name not in absent:
                parameter.grad = gradient(parameter, 1000 * number + index) + add

    def step(self, number: int, **dealt: Any) -> None:
        """Deal, step, and note the weights."""
        self.deal(number, **dealt)
        self.optimizer.step()
        self.note(f"after step {number}")

    def steps(self, *numbers: int) -> oracle.Named:
        """Several of them; what was noted so far."""
        for number in numbers:
            self.step(number)
        return self.seen

    def note(self, when: str) -> None:
        """Keep the weights as they are now."""
        for name, parameter in self.parameters.items():
            self.seen[f"{name} {when}"] = parameter.detach().clone()


def wide(width: int = WIDTH) -> nn.Sequential:
    """A float32 model whose parameters are large beside any padding."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])


def state_bytes(
    ctx: Context, model: Callable[[], nn.Module], *, load: bool = False, adds: bool = False
) -> int:
    """Bytes of AdamW's state on this rank, in whichever object the optimizer keeps it.

    That is what two steps of AdamW leave behind, less what two of SGD do, which has no state: flat
    copies of the parameters and bookkeeping are the same in both.

    Args:
        load: continue from the unsharded optimizer's state dict.
        adds: construct with the first parameter; each of the others is a group that is added.
    """
    adamw, sgd = (_bytes_left(ctx, model(), kind, load, adds) for kind in ("adamw", "sgd"))
    return adamw - sgd


def _bytes_left(ctx: Context, model: nn.Module, optimizer: str, load: bool, adds: bool) -> int:
    kind, options = OPTIMIZERS[optimizer]
    unsharded = kind(model.parameters(), **options)
    if load:
        _step_on_ones(model, unsharded)
    saved = unsharded.state_dict()
    with ctx.recording() as recorder:
        first, *others = ([p] for p in model.parameters()) if adds else (model.parameters(),)
        made = sharded(ctx)(first, kind, **options)
        for group in others:
            made.add_param_group({"params": group})
        if load:  # copies that an operator makes: what the recorder sees as new
            state = {n: {k: v.clone() for k, v in e.items()} for n, e in saved["state"].items()}
            made.load_state_dict({**saved, "state": state})
            del state
        for _ in range(2):
            _step_on_ones(model, made)
        # Cycles die in both runs, or in neither.
        return footprint.settled(recorder, looks=10, pause_s=0.01)


def _step_on_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def gradient(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Integers from -3 to 3 but zero, in the layout of `like`: every element moves."""
    generator = torch.Generator().manual_seed(seed)
    values = integers(like, 3, generator)
    return torch.empty_like(like, requires_grad=False).copy_(values)


def sharded(ctx: Context, process_group: Any = None) -> Make:
    """The implementation's optimizer, over the group."""

    def make(groups: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        return ctx.impl.sharded_optimizer(groups, kind, process_group=process_group, **options)

    return make


def plain(groups: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """The optimizer itself."""
    return kind(groups, **options)


def in_ranks(ctx: Context, script: Script, *args: Any, **options: Any) -> Any:
    """Rank body: the script with the sharded optimizer."""
    return script(Run(sharded(ctx), **options), *args)


def alone(script: Script, *args: Any, **options: Any) -> Any:
    """The script with the plain optimizer, in this process."""
    return script(Run(plain, **options), *args)


def tolerance(optimizer: str, dtype: torch.dtype, *, num_steps: int) -> Tolerance:
    """Equal bits where arithmetic is exact; else what moments and roots may round differently."""
    if optimizer not in ("adam", "adamw", "adafactor"):
        return exact()
    # A vector loop and the rest after it may round differently, and who divides moves the rest.
    return rounding(dtype, terms=8, depth=num_steps)


OTHERS_FAIL = " (sizes that the ranks divide: others fail, see zero1.step.equals-unsharded)"
_FITTING: dict[tuple[object, ...], str] = {}


def fitting(world: World) -> str:
    """The toy for clauses that are about another matter than sizes.

    What cuts parameters into equal parts alone fails `zero1.step.equals-unsharded`, and is judged
    on sizes that it takes elsewhere. What is wrong on both toys is judged on the usual one.
    """
    key = (world.target, world.transport, world.size)
    if key not in _FITTING:
        toys = (toy for toy in (TOY, DIVISIBLE) if trains(world, toy=toy))
        _FITTING[key] = next(toys, TOY)
    if _FITTING[key] != TOY:
        judge.SITUATION.get().given = f"toy {_word(_FITTING[key])}"
    return _FITTING[key]


def trains(world: World, **options: Any) -> bool:
    """Whether two steps are the unsharded optimizer's; where not, other clauses say so."""
    aside = dataclasses.replace(judge.SITUATION.get(), margins=[])
    # What is only tried says nothing: the case that is judged then meets the same.
    with judge.judging(aside), contextlib.suppress(Exception, RankDied, RankHung):
        ranks = world.run(in_ranks, Run.steps, 1, 2, **options)
        like_unsharded(ranks, Run.steps, 1, 2, **options)
        return True
    return False


def same_as_unsharded(
    world: World, script: Script, *args: Any, hints: Sequence[Hint] = (), **options: Any
) -> None:
    """On every rank the script must see what it sees with the plain optimizer.

    On the toy that `fitting` gives, where the options name none.
    """
    __tracebackhide__ = True
    options.setdefault("toy", fitting(world))
    ranks = world.run(in_ranks, script, *args, **options)
    like_unsharded(ranks, script, *args, hints=hints, **options)


def ordinary_steps(ctx: Context, toy: str) -> oracle.Named:
    """What no implementation may refuse."""
    return Run(sharded(ctx), toy=toy).steps(1, 2, 3, 4)


def as_unsharded_or_refused(world: World, *script: Any, **options: Any) -> None:
    """The unsharded optimizer's weights, or an error where AdamW's steps are none."""
    __tracebackhide__ = True
    toy = fitting(world)
    options.setdefault("toy", toy)
    ordinary = ordinary_steps, toy
    ranks = refusal.answer_or_refusal(world, in_ranks, *script, ordinary=ordinary, **options)
    if ranks is not None:
        like_unsharded(ranks, *script, **options)


def like_unsharded(
    ranks: Sequence[Any], script: Script, *args: Any, hints: Sequence[Hint] = (), **options: Any
) -> None:
    """As above, for what ranks have seen already."""
    __tracebackhide__ = True
    expected = alone(script, *args, **options)
    start = oracle.parameters(options.get("toy", TOY), SEED)
    never = {key: start[key.partition(" ")[0]] for key in expected}
    hints = [
        Hint("the initial weight: nobody updated it, or the update never arrived", never),
        *hints,
    ]
    for dtype in dict.fromkeys(tensor.dtype for tensor in expected.values()):
        names = [name for name, tensor in expected.items() if tensor.dtype == dtype]
        judge.tensors(
            [{name: seen[name] for name in names} for seen in ranks],
            {name: expected[name] for name in names},
            quantity="weight that the unsharded optimizer gives",
            within=tolerance(options.get("optimizer", "adamw"), dtype, num_steps=4),
            hints=hints,
            given=", ".join(f"{key} {_word(value)}" for key, value in options.items()),
        )


def _word(value: Any) -> str:
    return str(getattr(value, "__name__", value)) + (OTHERS_FAIL if value == DIVISIBLE else "")


def two_parameters(parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Fewer than the ranks."""
    return list(parameters.values())[:2]


def with_closure(run: Run, factor: float = 1.0) -> tuple[Any, dict[str, Any], int]:
    """Weights after steps with a closure that scales the rate, their results, and how many."""
    losses: dict[str, Any] = {}
    evaluations = 0
    for number in range(1, 4):

        def closure() -> Any:
            nonlocal evaluations
            evaluations += 1
            for group in run.optimizer.param_groups if factor != 1.0 else ():
                group["lr"] *= factor
            run.optimizer.zero_grad()
            loss = torch.stack([p.square().sum() for p in run.parameters.values()]).sum()
            loss.backward()
            return loss.detach()

        by_keyword = number == 2
        losses[f"step {number}"] = (
            run.optimizer.step(closure=closure) if by_keyword else run.optimizer.step(closure)
        )
        run.note(f"after step {number}")
    return run.seen, losses, evaluations
