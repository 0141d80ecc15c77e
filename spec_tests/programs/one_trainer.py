"""The trainer of one process, which is the oracle of trainers: its model, optimizer and faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spec_tests.programs.planted import PlantedError, fail
from spec_tests.programs.scene import Scene
from spec_tests.rig.toys import TOYS

SAMPLES, SEED = 4, 7

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
STANDS_IN = "stands in"
"""Key, beside what a trainer declares, of the optimizer used in place of one that it refused."""


def _stand_in(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return SGD for AdamW, and for SGD an AdamW whose updates are nearly linear in the gradient.

    Beside a large eps a constant factor of the gradient is seen, and rounding a gradient near zero
    does not turn the sign of a step.
    """
    if cls is torch.optim.AdamW:
        return OPTIMIZERS["momentum"]
    eps, betas = 16.0, (options["momentum"] or 0.9, 0.95)
    decay = options["weight_decay"] / eps
    lr = eps * options["lr"]
    return torch.optim.AdamW, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}


@dataclass(frozen=True)
class MakeOptimizer:
    """The contract's `make_optimizer`; with `matrices`, their names, of two groups."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    matrices: frozenset[str] | None = None

    @classmethod
    def of(cls, scene: Scene, *, stands_in: bool = False) -> MakeOptimizer:
        """Return that of a scene, or with `stands_in` the one that may stand in for it."""
        own = OPTIMIZERS[scene.word("moments")]
        found = cls(*(_stand_in(*own) if stands_in else own))
        if scene.word("groups") == "one-group":
            return found
        named = TOYS[scene["toy"][0]].model().named_parameters()
        return cls(found.cls, found.options, frozenset(n for n, p in named if p.ndim > 1))

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


def module_of(scene: Scene, *, plus: int = 0) -> nn.Module:
    """Return the model in float32, with what the scene freezes; `plus` gives other weights."""
    module = TOYS[scene["toy"][0]].build(SEED)
    generator = torch.Generator().manual_seed(SEED + plus)
    parameters = list(module.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    for number in scene["trained"]:
        parameters[number].requires_grad_(False)
    return module


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The contract's `loss`: the mean square of what the model returns, in float32.

    A batch may say that it raises in the forward or in the backward, and have a factor.
    """
    found: torch.Tensor = model(batch["x"], *batch["flags"]).float().square().mean()
    if batch.get("raises_in") == "forward":
        raise PlantedError
    if batch.get("raises_in") == "backward":
        found.register_hook(fail)
    return batch.get("factor", 1.0) * found


class OneProcess:
    """The trainer of one process, which gets the micro-batches of all ranks.

    Args:
        position: of the rank for which it stands among those ranks.
        declares: what the implementation declares, see `contract.trainer.Trainer`.
        fault: a wrong way that has a name, see `FAULTS`.
        plus: gives other weights than those of the scene.
    """

    def __init__(
        self,
        scene: Scene,
        size: int,
        position: int,
        declares: dict[str, Any],
        fault: str,
        plus: int,
    ) -> None:
        self.size, self.position, self.declares, self.fault = size, position, declares, fault
        self.accumulation, self.max_norm = scene["micro-batches"], scene["clipping"]
        self.module = module_of(scene, plus=plus + position * (fault == "own-start"))
        starts = range(size) if fault == "own-start" else ()
        self.starts = [module_of(scene, plus=plus + n) for n in starts]
        if fault == "frozen-trains":
            self.module.requires_grad_(True)
        self.frozen = [p for p in self.module.parameters() if not p.requires_grad]
        if fault in ("untied", "untied-in-place"):
            self._untie()
        make = MakeOptimizer.of(scene, stands_in=STANDS_IN in declares)
        self.optimizer = make(self.module.named_parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.saved: dict[str, Any] = {}
        self.is_interrupted = False

    def _untie(self) -> None:
        for part in self.module.modules():
            for name, old in part.named_parameters(recurse=False):
                new = old.detach() if self.fault == "untied-in-place" else old.detach().clone()
                setattr(part, name, nn.Parameter(new, old.requires_grad))

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Accumulate, clip once, step."""
        if self.fault != "never-clears" and not self.is_interrupted:
            self.optimizer.zero_grad()
        self.is_interrupted = False
        losses = []
        for number, batch in enumerate(self._counted(micro_batches)):
            rank, before = number * self.size // len(micro_batches), self._thawed()
            losses.append(loss(self._model_of(rank), batch))
            (losses[-1] * self._scale(len(micro_batches))).backward()  # type: ignore[no-untyped-call]  # torch's
            for parameter, gradient in before if rank != self.position else ():
                parameter.grad = gradient
            self._clip("clips-each")
        for parameter, _ in self._thawed():
            parameter.grad = None if parameter.grad is None else self.size * parameter.grad
        self._fill()
        self._clip("")
        if self.fault != "never-updates":
            self.optimizer.step()
        return torch.stack(losses).detach().mean()

    def _model_of(self, rank: int) -> Any:
        """Return the model of a rank, which differs from this one as it did at the start."""
        if not self.starts:
            return self.module
        own, other = (dict(self.starts[n].named_parameters()) for n in (self.position, rank))
        weights = {n: p + (other[n] - own[n]).detach() for n, p in self.module.named_parameters()}
        return lambda *given: torch.func.functional_call(self.module, weights, given)

    def _thawed(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Return the thawed parameters that the fault does not reduce, and their gradients."""
        thawed = self.frozen if self.fault == "thawed-own" else ()
        return [(p, None if p.grad is None else p.grad.clone()) for p in thawed]

    def interrupt(self, micro_batches: Sequence[Any], number: int) -> None:
        """A step raises in micro-batch `number` of each rank; its gradients may be left behind."""
        if self.fault == "interrupted-stays":
            self.optimizer.zero_grad()
            each = len(micro_batches) // self.size
            for batch in [b for n, b in enumerate(micro_batches) if n % each < number]:
                (loss(self.module, batch) * self._scale(len(micro_batches))).backward()  # type: ignore[no-untyped-call]  # torch's
            self.is_interrupted = True

    def _counted(self, batches: Sequence[Any]) -> Sequence[Any]:
        each = len(batches) // self.size
        if self.fault == "last-micro-batch":
            return batches[each - 1 :: each]
        own = batches[self.position * each :][:each]
        if self.fault == "own-alone":
            return own
        if self.fault == "local-stays":
            undivided = 1 if self.declares.get("gradient") == "sum" else self.size
            return [*batches[each - 1 :: each], *undivided * [*own[:-1]]]
        return batches[:each] if self.fault == "first-rank" else batches

    def _scale(self, count: int) -> float:
        times = {
            "sums-ranks": self.size,
            "sums-micro-batches": self.accumulation,
            "divides-by-two": self.size / 2,
            "divides-twice": 1 / self.accumulation,
            "divides-ranks-twice": 1 / self.size,
            "divides-by-accumulation": count / self.size / self.accumulation,
            "own-alone": self.size,
        }
        summed = self.size if self.declares.get("gradient") == "sum" else 1
        return times.get(self.fault, 1) * summed / count

    def _clip(self, fault: str) -> None:
        """Clip, in the right world after all micro-batches, in a wrong one after each."""
        is_due = (self.fault == "clips-each") is (fault == "clips-each")
        if is_due and self.max_norm is not None and self.fault != "unclipped":
            is_once = self.fault != "clips-tied-twice"
            named = self.module.named_parameters(remove_duplicate=is_once)
            norm = nn.utils.clip_grad_norm_([p for _, p in named], float("inf"))
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.max_norm, norm)

    def _fill(self) -> None:
        """Zeros where nothing arrived, if that is what the implementation declares."""
        fills_all, is_declared = self.fault == "fills", self.declares.get("unused") == "zero"
        for parameter in self.module.parameters():
            is_due = fills_all or (is_declared and parameter.requires_grad)
            if parameter.grad is None and is_due:
                parameter.grad = torch.zeros_like(parameter)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return the loss with current weights."""
        self.module.eval()
        with torch.no_grad():
            found = loss(self.module, batch)
        self.module.train()
        return found

    def full_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights."""
        return dict(self.module.named_parameters())

    def set_lr(self, factor: float) -> None:
        """Set the rate of every group."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate

    def save(self, directory: str) -> None:
        """Keep weights and optimizer state."""
        state = [part.state_dict() for part in (self.module, self.optimizer)]
        self.saved[directory] = copied(state)

    def load(self, directory: str) -> None:
        """Take them back."""
        for part, state in zip((self.module, self.optimizer), self.saved[directory], strict=True):
            if part is self.module or self.fault != "loads-weights-alone":
                part.load_state_dict(copied(state))
        if self.fault == "rates-of-the-load":
            self.rates = [group["lr"] for group in self.optimizer.param_groups]


def copied(tree: Any) -> Any:
    """Return the same with copies of all tensors."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


FAULTS = {
    "never-updates": "the weight before any step: it was never updated",
    "sums-ranks": "gradients of the ranks are summed and not averaged",
    "sums-micro-batches": "gradients of the micro-batches are summed and not averaged",
    "divides-twice": "divided by the number of micro-batches twice",
    "divides-ranks-twice": "divided by the number of ranks twice",
    "divides-by-accumulation": "divided by `accumulation`, whatever the number of micro-batches",
    "divides-by-two": "divided by 2, whatever the number of ranks",
    "last-micro-batch": "the last micro-batch alone: the earlier ones were lost",
    "local-stays": "the last micro-batch was reduced, the earlier ones stayed local",
    "first-rank": "the first rank's micro-batches alone",
    "unclipped": "not clipped",
    "clips-each": "clipped after every micro-batch and not once per step",
    "clips-tied-twice": "clipped by a norm in which a tied weight counts under each of its names",
    "fills": "weight decay or momentum was applied to a parameter without a gradient",
    "never-clears": "gradients of the steps before are still in it: they were not cleared",
    "interrupted-stays": "gradients of the interrupted step are in the next one",
    "own-start": "trained from the rank's own weights, and not from the first rank's",
    "own-alone": "this rank's micro-batches alone: gradients were not reduced",
    "thawed-own": "the gradient of a thawed parameter is this rank's own: it is not reduced",
    "frozen-trains": "frozen weights are trained, as Parameters made anew are",
    "untied": "a tied weight is trained by its first name's gradient alone: "
    "the tie, or the other gradient, is lost",
    "untied-in-place": "a tied weight became two Parameters in one memory: each is updated, by its "
    "own gradient alone",
    "loads-weights-alone": "the optimizer's state is not that of the load: it went on as it was",
    "rates-of-the-load": "`set_lr` multiplies the rates that were saved, and not the initial ones",
    "swallows": "an exception of the caller's code is swallowed",
}
