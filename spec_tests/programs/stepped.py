"""A sharded optimizer's way through a program: one class for the oracle and for a rank.

Gradients "arrive already averaged", so they are not computed but dealt: integers that depend on the
number of the step and the parameter. The plain optimizer of one process is the oracle, and what
`sharded_optimizer` makes of the same class is judged. Both follow the same methods.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spec_tests.programs.alone import SEED, one_of
from spec_tests.programs.machine import Machine
from spec_tests.programs.planted import PlantedError
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge.oracle import Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.toys import TOYS, integers

ADDED = 2.0
"""The weights of a group that is added."""
FAULTS = {
    "deaf": "a change of `param_groups` is not followed: the inner optimizer has its own options",
    "half-deaf": "a change of the rate in `param_groups` is followed, one of another option is not",
    "deaf-later": "after a load a change of `param_groups` is not followed",
    "keeps-state": "a load keeps the state of what the loaded dict has no state for",
    "fills": "weight decay or momentum was applied to a parameter without a gradient",
    "copies": "a copy of the weights was updated, and put over what had been written to them",
    "forgets": "the state was not loaded: training goes on with what it held before",
    "uncounted": "what the optimizer writes into its groups, such as a count of steps, was lost",
}
"""What wrong ones do, by name."""


class Stepped(Machine):
    """A toy's parameters with an optimizer over them; here the plain one, which is the oracle.

    Args:
        fault: a wrong way that has a name, see `FAULTS`.
    """

    copies: Sequence[torch.Tensor] = ()

    def __init__(self, scene: Scene | str, fault: str = "") -> None:
        self.scene, self.fault = (scene := Scene.of(scene)), fault
        module = TOYS[scene["toy"][0]].build(SEED).to(scene.weights)
        self.parameters = dict(module.named_parameters())
        held = self.held = list(self.parameters.values())
        for number in scene["trained"]:
            held[number].requires_grad_(False)
        kind, options = scene["moments"]
        groups = scene["groups"](held)
        is_bare = len(groups) == 1 and [*groups[0]] == ["params"]
        options = copy.deepcopy(options)  # a rate that is a tensor is changed in place
        self.optimizer = self.made(groups[0]["params"] if is_bare else groups, kind, **options)
        self.saved: Any = None

    def made(self, groups: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        return kind(groups, **options)

    def state(self) -> dict[str, Any]:
        """Return the state dict of the unsharded optimizer."""
        return self.optimizer.state_dict()  # type: ignore[no-any-return]  # of a plain one

    def weights(self) -> Named:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def deal(self, micro: str, whose: str) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = None
            is_given = {"all": True, "half": index % 2 == 1, "one": index == 0, "none": False}
            if parameter.requires_grad and is_given[whose]:
                generator = torch.Generator().manual_seed(1000 * int(micro) + index)
                values = integers(parameter, 3, generator)
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(values)

    def update(self) -> Named:
        for parameter in self.parameters.values() if self.fault == "fills" else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter, copied in zip(self.held, self.copies, strict=False):
            parameter.data.copy_(copied)
        groups = self.optimizer.param_groups if self.fault == "uncounted" else []
        options = [dict(group) for group in groups]
        self.optimizer.step()
        for group, before in zip(groups, options, strict=True):
            group.update(before)
        if self.fault == "copies":
            self.copies = [parameter.detach().clone() for parameter in self.held]
        return self.weights()

    def closure(self, micro: str, does: str) -> Named:
        def closure() -> torch.Tensor:
            if does == "raises":
                raise PlantedError
            if does == "sets-the-rate":
                self.rate("0.5")
            self.deal(micro, "all")
            return torch.zeros(())

        with contextlib.suppress(PlantedError):
            self.optimizer.step(closure)
        return self.weights()

    def rate(self, factor: str) -> None:
        if self.fault == "deaf":
            return
        first: dict[str, Any] = next(iter(self.optimizer.param_groups), {})
        if "lr" not in first:
            raise LookupError(f"expected a rate in param_groups[0]['lr'], got keys {[*first]}")
        first["lr"] *= float(factor)

    def decay(self) -> None:
        is_deaf = self.fault in ("deaf", "half-deaf")
        for group in () if is_deaf else self.optimizer.param_groups:
            group["weight_decay"] = 0.25

    def add_group(self) -> None:
        more = [
            nn.Parameter(torch.full((n, 3), ADDED, dtype=self.scene["weights"])) for n in (2, 5)
        ]
        self.parameters |= {f"more.{n}": parameter for n, parameter in enumerate(more)}
        self.optimizer.add_param_group({"params": more, "lr": 2.0**-5})

    def zero_grad(self, how: str) -> None:
        self.optimizer.zero_grad(**({} if how == "none" else {"set_to_none": False}))

    @torch.no_grad()
    def write(self, where: str) -> Named:
        for number, parameter in enumerate(self.parameters.values()):
            if where == "elsewhere":
                parameter.data = -parameter
            elif where == "parameters" or number == one_of(list(self.parameters)):
                parameter.neg_()
        return self.weights()

    def save(self) -> Named:
        """Save, and show the rates that are saved."""
        tensors = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), self.state())
        self.saved = (self.weights(), tensors)
        rates = [group["lr"] for group in tensors["param_groups"]]
        return {f"rate of group {n}": torch.tensor(float(rate)) for n, rate in enumerate(rates)}

    @torch.no_grad()
    def load(self, how: str) -> Named:
        weights, state = self.saved
        kept = dict(self.optimizer.state) if self.fault == "keeps-state" else {}
        for name, value in weights.items():
            self.parameters[name].copy_(value)
        self.fault = self.fault.removesuffix("-later")
        has_grown = len(state["param_groups"]) != len(self.optimizer.param_groups)
        if not has_grown and self.fault != "forgets":
            self.optimizer.load_state_dict(state)
        for parameter, entry in kept.items():
            self.optimizer.state.setdefault(parameter, entry)
        return self.weights()


class Divided(Stepped):
    """The same with the implementation's sharded optimizer, on a rank."""

    def __init__(self, ctx: Context, scene: Scene | str) -> None:
        self.ctx, groups = ctx, Scene.of(scene)["group"]
        self.group = ctx.split(groups) if groups else None
        super().__init__(scene)

    def made(self, groups: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
        apart = {} if self.group is None else {"process_group": self.group}
        return self.ctx.impl.sharded_optimizer(groups, kind, **apart, **options)

    def state(self) -> dict[str, Any]:
        return self.ctx.impl.full_optimizer_state(self.optimizer)

    def another_lives(self) -> None:
        """Another model gets a sharded optimizer, is trained for a step and dropped."""
        other = Divided(self.ctx, "mlp adam")
        other.deal("3", "all")
        other.update()
