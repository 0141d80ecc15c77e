"""A training run in small, in ranks around a trainer and in the parent in one process.

A script is a module-level function that takes a `Session`, trains, and notes weights. `in_ranks`
follows it with the implementation's trainer, which gets this rank's micro-batches; `alone` follows
it with `OneProcess`, which gets those of all ranks, and is the oracle. Everything is float32: real
libraries keep float32 weights whatever they are given.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance, rounding
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS

BUILDERS = ("build_trainer", "build_zero1_trainer", "build_fsdp_trainer")
SAMPLES = 4
_PREFIX = re.compile(r"^((module|_orig_mod)\.)+")  # of DistributedDataParallel, of torch.compile

Named = dict[str, torch.Tensor]
Script = Callable[..., Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.5},
    ),
    # Steps so small that a bfloat16 weight would not move.
    "slow": (torch.optim.SGD, {"lr": 2.0**-11, "momentum": 0.0, "weight_decay": 0.0}),
    # A momentum that decays by less in a step than bfloat16 can tell.
    "lasting": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.999, "weight_decay": 0.0}),
}


@dataclass(frozen=True)
class MakeOptimizer:
    """The contract's `make_optimizer`; with `matrices`, their names, of two groups."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    matrices: frozenset[str] | None = None

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Return one group, or those named as matrices and the rest, which does not decay."""
        named = [(name.removeprefix("module."), p) for name, p in named_parameters]
        if self.matrices is None:
            return [{"params": [p for _, p in named]}]
        # By name: who trains flat copies has the names, and other shapes.
        matrices = [p for name, p in named if name in self.matrices]
        rest = [p for name, p in named if name not in self.matrices]
        rate = self.options["lr"] / 4
        return [{"params": matrices}, {"params": rest, "lr": rate, "weight_decay": 0.0}]

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        """Return the optimizer."""
        return self.cls(self.groups(named_parameters), **self.options)


@dataclass(frozen=True)
class Setup:
    """A model, an optimizer and options of a trainer; a failure prints what is not the default.

    Attributes:
        uses: for toy "branches" the branches of each micro-batch, one tuple per rank.
        loss_factor: what every loss is multiplied by, and so the gradient.
        poisoned: the step in which rank 1 has a NaN in its first micro-batch.
    """

    toy: str = "mlp"
    optimizer: str = "sgd"
    accumulation: int = 1
    max_norm: float | None = None
    dtype: torch.dtype = torch.float32
    splits: bool = False
    seed: int = 7
    loss_factor: float = 1.0
    uses: tuple[tuple[str, ...], ...] = ()
    poisoned: int | None = None

    def __str__(self) -> str:
        default = Setup()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k) and k != "toy"}
        return ", ".join([f"toy {self.toy!r}", *(f"{k} {v}" for k, v in changed.items())])

    def module(self, *, plus: int = 0) -> nn.Module:
        """A fresh model in float32; equal seeds give equal weights."""
        module = TOYS[self.toy].build(self.seed)
        generator = torch.Generator().manual_seed(self.seed + plus)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        return module

    def make_optimizer(self) -> MakeOptimizer:
        """What `build_trainer` is given."""
        if not self.splits:
            return MakeOptimizer(*OPTIMIZERS[self.optimizer])
        named = self.module().named_parameters()
        matrices = frozenset(name for name, p in named if p.ndim > 1)
        return MakeOptimizer(*OPTIMIZERS[self.optimizer], matrices)

    def micro_batch(self, rank: int, step: int, micro: int) -> dict[str, Any]:
        """Inputs that belong to one rank, step and micro-batch and to no other."""
        generator = torch.Generator().manual_seed(self.seed + 101 * rank + 10_007 * step + micro)
        # Micro-batches of unequal size of gradient: who clips or weighs each alone is seen.
        # Some toys take the first column as the number of a row, below five.
        x = ((1.0 + micro) * torch.randn(SAMPLES, 6, generator=generator)).clamp(-4, 4)
        if step == self.poisoned and rank == 1 and micro == 0:
            x[0, 0] = torch.nan
        flags = {"use": self.uses[rank][micro]} if self.uses else {}
        return {"x": x, "flags": flags, "factor": self.loss_factor}


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The contract's `loss`: the mean square of what the model returns, in float32."""
    out = model(batch["x"], **batch["flags"])
    return batch["factor"] * out.float().square().mean()


@dataclass
class Session:
    """A trainer, the ranks whose micro-batches it gets, and what was seen."""

    trainer: Any
    setup: Setup
    ranks: Sequence[int]
    module: nn.Module  # that the trainer was built around
    device: torch.device | str = "cpu"
    seen: Named = field(default_factory=dict)
    late: Callable[[], None] = lambda: None

    def micro_batches(self, step: int) -> list[dict[str, Any]]:
        """Those of one step, rank by rank."""
        numbers = range(self.setup.accumulation)
        return [self.batch(rank, step, micro) for rank in self.ranks for micro in numbers]

    def batch(self, rank: int, step: int, micro: int = 0) -> dict[str, Any]:
        """One of them, on the device."""
        found = self.setup.micro_batch(rank, step, micro)
        return {**found, "x": found["x"].to(self.device)}

    def step(self, number: int) -> Any:
        """Take a step and note the weights."""
        found = self.trainer.step(self.micro_batches(number))
        self.note(f"after step {number}")
        return found

    def steps(self, *numbers: int) -> None:
        """Take several."""
        for number in numbers:
            self.step(number)

    def note(self, when: str) -> None:
        """Keep the weights as they are now."""
        plain = self.setup.module()
        aliases = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
        aliases -= {name for name, _ in plain.named_parameters()}
        for name, tensor in self.weights().items():
            if name not in aliases:  # a tied weight has one name, and may be given under both
                self.seen[f"{name} {when}"] = tensor.cpu()

    def weights(self) -> Named:
        """Return copies of the weights by the plain model's names.

        A wrapper's own prefix does not count: `trainer.parameters.whole-by-plain-names` judges it.
        """
        found = self.trainer.full_parameters()
        return {_PREFIX.sub("", name): tensor.detach().clone() for name, tensor in found.items()}


class OneProcess:
    """The oracle: one process that gets the micro-batches of all ranks.

    Args:
        declares: what the implementation declares, see `contract.trainer.Trainer`.
        fault: a wrong way that has a name, see `FAULTS`.
    """

    def __init__(
        self, setup: Setup, module: nn.Module, ranks: int, declares: dict[str, Any], fault: str
    ) -> None:
        self.setup, self.module, self.ranks, self.fault = setup, module, ranks, fault
        self.declares = declares
        self.optimizer = setup.make_optimizer()(module.named_parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Accumulate, clip once, step."""
        if self.fault != "never-clears":
            self.optimizer.zero_grad()
        losses = []
        for batch in self._counted(micro_batches):
            losses.append(loss(self.module, batch))
            (losses[-1] * self._scale(len(micro_batches))).backward()
            self._after_backward()
        self._fill()
        if self.setup.max_norm is not None and self.fault not in ("unclipped", "clips-each"):
            nn.utils.clip_grad_norm_(self.module.parameters(), self.setup.max_norm)
        self.optimizer.step()
        return torch.stack(losses).detach().mean()

    def _counted(self, batches: Sequence[Any]) -> Sequence[Any]:
        each = self.setup.accumulation
        if self.fault == "last-micro-batch":
            return [batch for i, batch in enumerate(batches) if i % each == each - 1]
        return batches[:each] if self.fault == "first-rank" else batches

    def _scale(self, count: int) -> float:
        factor = {
            "sums-ranks": self.ranks,
            "sums-micro-batches": self.setup.accumulation,
            "divides-by-two": self.ranks / 2,
        }
        divides = {"divides-twice": self.setup.accumulation, "divides-ranks-twice": self.ranks}
        scale = factor.get(self.fault, 1) / divides.get(self.fault, 1) / count
        return scale * (self.ranks if self.declares.get("gradient") == "sum" else 1)

    def _after_backward(self) -> None:
        if self.fault == "clips-each" and self.setup.max_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.setup.max_norm)

    def _fill(self) -> None:
        """Zeros where nothing arrived, if that is what the implementation declares."""
        for parameter in self.module.parameters():
            is_absent = parameter.grad is None and parameter.requires_grad
            if is_absent and self.declares.get("unused") == "zero":
                parameter.grad = torch.zeros_like(parameter)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss with current weights."""
        self.module.eval()
        with torch.no_grad():
            found = loss(self.module, batch)
        self.module.train()
        return found

    def full_parameters(self) -> dict[str, nn.Parameter]:
        """The weights."""
        return dict(self.module.named_parameters())

    def set_lr(self, factor: float) -> None:
        """The rate of every group."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate


FAULTS = {
    "sums-ranks": "gradients of the ranks are summed and not averaged",
    "sums-micro-batches": "gradients of the micro-batches are summed and not averaged",
    "divides-twice": "divided by the number of micro-batches twice",
    "divides-ranks-twice": "divided by the number of ranks twice",
    "divides-by-two": "divided by 2, whatever the number of ranks",
    "last-micro-batch": "the last micro-batch alone: the earlier ones were lost",
    "first-rank": "the first rank's micro-batches alone",
    "unclipped": "not clipped",
    "clips-each": "clipped after every micro-batch and not once per step",
    "never-clears": "gradients of the steps before are still in it: they were not cleared",
}


def session(
    ctx: Context,
    subject: str,
    setup: Setup,
    *,
    plus: int = 0,
    group: Any = None,
    loss: Loss = loss,
    module: nn.Module | None = None,
) -> Session:
    """This rank's session around a new trainer; `plus` changes the initial weights."""
    module = (setup.module(plus=plus) if module is None else module).to(ctx.device)
    trainer = getattr(ctx.impl, subject)(
        module,
        setup.make_optimizer(),
        loss=loss,
        accumulation=setup.accumulation,
        max_norm=setup.max_norm,
        dtype=setup.dtype,
        process_group=group,
    )
    late = functools.partial(ctx.be_late, 0.05)
    return Session(trainer, setup, [ctx.rank], module, ctx.device, late=late)


def in_ranks(
    ctx: Context, subject: str, script: Script, setup: Setup, *args: Any, **options: Any
) -> Any:
    """Rank body: the script with the implementation's trainer."""
    run = session(ctx, subject, setup, **options)
    script(run, *args)
    return {"seen": run.seen, "declares": declared(run.trainer)}


def declared(trainer: Any) -> dict[str, Any]:
    """What the trainer says of itself."""
    return dict(getattr(trainer, "declares", {}))


def method(trainer: Any, name: str) -> Any:
    """An optional method; where it is absent the clause is not judged."""
    found = getattr(trainer, name, None)
    if found is None:
        raise NotImplementedError(f"the trainer has no {name}()")
    return found


def alone(
    script: Script,
    setup: Setup,
    *args: Any,
    ranks: Sequence[int],
    declares: dict[str, Any] | None = None,
    fault: str = "",
    plus: int = 0,
) -> Named:
    """The same in one process: what is right."""
    module = setup.module(plus=plus)
    trainer = OneProcess(setup, module, len(ranks), declares or {}, fault)
    run = Session(trainer, setup, ranks, module)
    script(run, *args)
    return run.seen


def copied(tree: Any) -> Any:
    """Return the same with copies of all tensors."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def tolerance(setup: Setup, seen: Named) -> Tolerance:
    """Two right orders of every sum, in as many steps as were noted."""
    return within(setup, len({key.partition(" ")[2] for key in seen}))


def within(setup: Setup, steps: int) -> Tolerance:
    """Two right orders of every sum, in so many steps, each four sums deep."""
    terms = SAMPLES * 8 * setup.accumulation
    return rounding(torch.float32, terms=terms, depth=4 * max(steps, 1))


def matches(
    observed: Sequence[Named],
    script: Script,
    setup: Setup,
    *args: Any,
    ranks: Sequence[int],
    **options: Any,
) -> None:
    """What was observed must be what one process sees that gets the micro-batches of `ranks`."""
    __tracebackhide__ = True
    expected = alone(script, setup, *args, ranks=ranks, **options)
    hints = [Hint("the weight before any step: it was never updated", start(setup, expected))]
    for fault, meaning in FAULTS.items():
        wrong = alone(script, setup, *args, ranks=ranks, **options, fault=fault)
        if any(not torch.equal(wrong[name], tensor) for name, tensor in expected.items()):
            hints.append(Hint(meaning, wrong))
    own = [alone(script, setup, *args, ranks=[rank], **options) for rank in ranks]
    hints.append(Hint("this rank's micro-batches alone: gradients were not reduced", own))
    judge.tensors(
        observed,
        expected,
        quantity="weight that one process gets",
        within=tolerance(setup, expected),
        hints=hints,
        given=str(setup),
    )


def start(setup: Setup, like: Named) -> Named:
    """Initial weights under the names of what was seen."""
    weights = {name: p.detach().clone() for name, p in setup.module().named_parameters()}
    return {key: weights[key.partition(" ")[0]] for key in like}


def same_as_one_process(
    world: World, subject: str, script: Script, setup: Setup, *args: Any
) -> None:
    """On every rank the script must see what it sees in one process."""
    __tracebackhide__ = True
    found = world.run(in_ranks, subject, script, setup, *args)
    _judged(world, found, script, setup, *args)


def one_process_or_refusal(
    world: World, subject: str, script: Script, setup: Setup, *args: Any
) -> None:
    """The same, or an error where two steps of an ordinary model with the same options are none."""
    __tracebackhide__ = True
    usual = dataclasses.replace(setup, toy="mlp", uses=())
    ordinary = (in_ranks, subject, Session.steps, usual, 1, 2)
    found = refusal.answer_or_refusal(
        world, in_ranks, subject, script, setup, *args, ordinary=ordinary
    )
    if found is not None:
        _judged(world, found, script, setup, *args)


def _judged(world: World, found: Any, script: Script, setup: Setup, *args: Any) -> None:
    __tracebackhide__ = True
    seen = [rank["seen"] for rank in found]
    ranks = range(world.size)
    matches(seen, script, setup, *args, ranks=ranks, declares=found[0]["declares"])
