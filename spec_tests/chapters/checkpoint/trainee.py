"""One rank's training run in small: what the bodies of this chapter save, load and look at.

Everything that a checkpoint must bring back has an effect on the weights here: moments and step
count through AdamW, the loader through which batch comes next, and every generator through a factor
that the batch is multiplied by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel

from spec_tests.programs.laws import refusal
from spec_tests.programs.ways import replicated
from spec_tests.rig import judge
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.toys import TOYS, sum_of_squares

State = dict[str, torch.Tensor]


class Counting(torch.optim.SGD):
    """Counts the updates of each parameter in a Python number, as many optimizers outside do."""

    def step(self, closure: Any = None) -> Any:
        """As SGD, counted."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state["updates"] = state.get("updates", 0) + 1
        return super().step(closure)


class Remembering(torch.optim.Optimizer):
    """Keeps one thing for each parameter, `remembered(old, gradient)`, and goes along it."""

    def __init__(
        self, params: Any, remembered: Callable[..., Any], direction: Callable[..., Any], lr: float
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.remembered, self.direction = remembered, direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Of gradients that are there."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["kept"] = self.remembered(state.get("kept"), parameter.grad)
                change = self.direction(state["kept"]).to(parameter.dtype)
                parameter.add_(change, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-5),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-5, momentum=0.9),
    # Numbers of float32 beside parameters of any dtype: a moment, or master weights.
    "wide": lambda groups: Remembering(
        groups, lambda old, g: (1 / 3 if old is None else old) + g.float(), lambda kept: kept, 1e-5
    ),
    "python-count": lambda groups: Counting(groups, lr=1e-5, momentum=0.9),
    "count-alone": lambda groups: Counting(groups, lr=1e-5),
}


class Stream:
    """A loader: batches by number, and the number is its whole state.

    It counts on in the state that it is given, which it takes for its own.
    """

    def __init__(self, toy: str, seed: int, rank: int) -> None:
        self.toy, self.seed, self.rank = TOYS[toy], seed, rank
        self.place = {"position": 0}

    @property
    def position(self) -> int:
        """How many batches it has given."""
        return self.place["position"]

    def next(self) -> torch.Tensor:
        """The next batch."""
        self.place["position"] += 1
        return self.toy.batch(self.seed, rank=self.rank, micro=self.position)

    def state_dict(self) -> dict[str, Any]:
        """How far it has come."""
        return dict(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.place = state


class Trainee:
    """A toy with its optimizer, loader and generators, as one rank of a run has them.

    Args:
        wrapper: "ddp" or "ddp_bucketed" of the implementation, "torch" for PyTorch's, None for the
            bare toy, which every rank then trains on the same data.
        change: alters the model before anything is made of it.
        reverse: "", or parameters are in reverse order, in "one-group" or in "two-groups".
        loader: the class of its loader.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        toy: str = "ragged",
        seed: int = 7,
        optimizer: str = "adamw",
        wrapper: str | None = None,
        change: Callable[[nn.Module], None] | None = None,
        reverse: str = "",
        loader: type[Stream] = Stream,
    ) -> None:
        self.ctx, self.wrapper = ctx, wrapper
        self.module = TOYS[toy].build(seed).to(ctx.device)
        if change is not None:
            change(self.module)
        self.original = dict(self.module.named_parameters())
        trainable = [p for p in self.original.values() if p.requires_grad]
        groups = [trainable[::-1]] if reverse else [trainable]
        if reverse == "two-groups":
            groups = [trainable[:0:-1], trainable[:1]]
        self.optimizer = OPTIMIZERS[optimizer]([{"params": group} for group in groups])
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.model = self._wrapped()
        self.loader = loader(toy, 7, ctx.rank if wrapper else 0)
        self.seed_generators(1000 * seed + ctx.rank)

    @classmethod
    def saved(cls, ctx: Context, directory: str, step: int = 1, **options: Any) -> Trainee:
        """A trainee after `step` steps, and its save."""
        trainee = cls(ctx, **options)
        trainee.train(step)
        trainee.save(directory, step=step)
        return trainee

    def _wrapped(self) -> Any:
        if self.wrapper == "torch":
            return DistributedDataParallel(self.module)
        if self.wrapper is None:
            return self.module
        return replicated(self.ctx, self.wrapper, self.module, bucket_size_mb=1e-4)

    def seed_generators(self, seed: int) -> None:
        """All of them, so that they are those of this trainee.

        NumPy and Python make normal numbers in pairs: the second of each waits in the state.
        """
        torch.manual_seed(seed)
        np.random.seed(seed)
        np.random.standard_normal()
        random.seed(seed)
        random.gauss()

    def halve_options(self) -> None:
        """Change what the optimizer was made with, as a schedule or a second phase does.

        A second group's options become other ones than those of the first.
        """
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, float):
                    group[key] = value / 2 ** (number + 1)
                elif key == "betas":
                    group[key] = tuple(beta / 2 for beta in value)

    def train(self, steps: int = 1) -> None:
        """Optimizer steps; the learning rate falls, so that it is worth saving."""
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.75

    def backward(self) -> None:
        """Gradients of the next batch."""
        batch = self.loader.next().to(self.ctx.device)
        if self.wrapper is not None or self.ctx.world_size == 1:
            batch = dropout(batch) * (1.0 + np.random.random() + random.random())
        sum_of_squares(self.model(batch)).backward()
        if self.wrapper in ("ddp", "ddp_bucketed"):
            self.ctx.impl.finish_gradient_synchronization(self.model)

    def save(self, directory: str, step: int) -> None:
        """With the implementation."""
        self.ctx.impl.save_checkpoint(
            directory, step=step, model=self.model, optimizer=self.optimizer, loader=self.loader
        )

    def load(self, directory: str) -> int:
        """With the implementation; its step."""
        return self.ctx.impl.load_checkpoint(
            directory, model=self.model, optimizer=self.optimizer, loader=self.loader
        )

    def read(self, directory: str, where: str = "") -> dict[str, Any]:
        """Try to load; what came of it, and the state before and after."""
        before = self.state()
        step = None
        with refusal.caught(BaseException) as caught:  # the library's own is no Exception
            step = self.load(directory)
        found = {"where": where, "step": step, "error": caught["error"]}
        return {**found, "before": before, "state": self.state()}

    def state(self) -> State:
        """Everything, by name; copies."""
        found = self.weights() | self.moments()
        found["loader: position"] = torch.tensor(self.loader.position)
        return found | self.generators()

    def weights(self) -> State:
        """Parameters, of the objects that there were before wrapping, and buffers."""
        named = {**self.original, **dict(self.module.named_buffers())}
        return {f"model: {name}": _copy(tensor) for name, tensor in named.items()}

    def moments(self) -> State:
        """Options of the optimizer that are numbers, and its state, by parameter name."""
        names = {id(p): name for name, p in self.original.items()}
        found = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                entries = {**group, **self.optimizer.state.get(parameter, {})}
                del entries["params"]
                for key, value in entries.items():
                    if isinstance(value, int | float | tuple | list | torch.Tensor):
                        found[f"optimizer: {name}: {key}"] = _copy(value)
        return found

    def generators(self) -> State:
        """The states of torch's, NumPy's and Python's generators; nothing is drawn."""
        _, keys, position, has_second, second = np.random.get_state(legacy=True)
        _, words, python_second = random.getstate()
        return {
            "random: torch": torch.get_rng_state(),
            "random: numpy": torch.from_numpy(np.append(keys, position).astype(np.int64)),
            "random: numpy, second normal": torch.tensor(
                second if has_second else 0.0, dtype=torch.float64
            ),
            "random: python": torch.tensor(words),
            "random: python, second normal": torch.tensor(
                python_second or 0.0, dtype=torch.float64
            ),
        }


def _copy(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return torch.tensor(value, dtype=torch.float64)


def part(state: State, *kinds: str) -> State:
    """Those entries of a state: "model", "optimizer", "loader", "random"."""
    return {name: t for name, t in state.items() if name.partition(":")[0] in kinds}


def round_trip(
    ctx: Context,
    directory: str,
    *,
    wrappers: tuple[str | None, str | None] = (None, None),
    reverses: tuple[str, str] = ("", ""),
    loaders: tuple[type[Stream], type[Stream]] = (Stream, Stream),
    freezes: bool = False,
    **kind: Any,
) -> dict[str, Any]:
    """The state when it was saved, one step later, before loading and after; and the step.

    Args:
        wrappers, reverses, loaders: of the trainee that saves, and of the one that loads.
        freezes: a layer that has trained is frozen when it is saved.
        kind: of both.
    """
    of_first, of_second = (
        {"wrapper": w, "reverse": r, "loader": s, **kind}
        for w, r, s in zip(wrappers, reverses, loaders, strict=True)
    )
    trainee = Trainee(ctx, **of_first)
    trainee.halve_options()
    trainee.train(2)
    if freezes:
        next(iter(trainee.original.values())).requires_grad_(False)
    trainee.save(directory, step=2)
    found = {"saved": trainee.state()}
    trainee.train()
    fresh = Trainee(ctx, **of_second, seed=8)
    found |= {"later": trainee.state(), "before": fresh.state()}
    step = fresh.load(directory)
    return {**found, "loaded": fresh.state(), "step": step}


def compare(ranks: Sequence[dict[str, Any]], *kinds: str, quantity: str, given: str = "") -> None:
    """The parts of these kinds that were loaded are those that were saved."""
    __tracebackhide__ = True

    def only(moment: str) -> list[State]:
        return [part(rank[moment], *kinds) for rank in ranks]

    moments = {
        "before": "the value from before the load: it was not loaded, or not saved",
        "later": "the value of one step later: the save did not copy it",
    }
    judge.tensors(
        only("loaded"),
        only("saved"),
        quantity=quantity,
        hints=[Hint(likely, only(at)) for at, likely in moments.items()],
        given=given,
    )
