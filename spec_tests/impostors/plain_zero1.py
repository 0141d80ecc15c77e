"""A plain, right sharded optimizer with every decision in a method of its own.

The near-misses of the zero1 chapter are subclasses that override one decision. It is itself a
benign variant: unusual (one blocking broadcast per parameter, state that travels pickled), right,
and so every clause up to level `correct` must accept it. It is written apart from any solution, so
an impostor stays what it is however a solution is rewritten.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Impostor

Group = dict[str, Any]


class PlainZero1(torch.optim.Optimizer):
    """Every parameter has an owner, whose inner optimizer updates it; then it is broadcast."""

    inner: Any = None

    def __init__(self, params: Any, kind: type[torch.optim.Optimizer], group: Any, options: Group):
        self.group = group
        self.owners: dict[torch.Tensor, int] = {}
        self.loads = [0] * self.size()
        super().__init__(params, {})
        self.inner = kind([self.own_part(g) for g in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self.show()

    def size(self) -> int:
        return dist.get_world_size(self.group)

    def rank(self) -> int:
        return dist.get_rank(self.group)

    # --------------------------------------------------------------------------- who owns what

    def deal(self, parameters: list[torch.Tensor]) -> None:
        """The largest first, to whoever has least."""
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            owner = self.loads.index(min(self.loads))
            self.owners[parameter] = owner
            self.loads[owner] += parameter.numel()

    def owned(self, parameter: torch.Tensor) -> bool:
        return self.owners[parameter] == self.rank()

    def own_part(self, group: Group) -> Group:
        return {**group, "params": [p for p in group["params"] if self.owned(p)]}

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self.deal(self.param_groups[-1]["params"])
        if self.inner is not None:
            self.inner.add_param_group(self.own_part(self.param_groups[-1]))
            self.show()

    def show(self) -> None:
        """What the inner optimizer knows goes outside: defaults, and its state."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({k: v for k, v in inner.items() if k != "params"})
        self.state = self.inner.state

    # ---------------------------------------------------------------------------------- a step

    def step(self, closure: Any = None) -> Any:
        self.hand_in()
        loss = self.update(closure)
        self.exchange()
        return loss

    def hand_in(self) -> None:
        """Options that were changed outside."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({k: v for k, v in outer.items() if k != "params"})

    def update(self, closure: Any) -> Any:
        return self.inner.step() if closure is None else self.inner.step(closure)

    def exchange(self) -> None:
        for parameter, owner in self.owners.items():
            self.take(parameter, owner)

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        whole = parameter.detach().contiguous()
        dist.broadcast(whole, group=self.group, group_src=owner)
        parameter.copy_(whole)

    # ------------------------------------------------------------------------------ the state

    def state_dict(self) -> Group:
        raise RuntimeError("the state is divided; call full_optimizer_state on all ranks")

    def full_state(self) -> Group:
        packed = copy.deepcopy(torch.optim.Optimizer.state_dict(self))
        parts: list[Any] = [None] * self.size()
        dist.all_gather_object(parts, packed["state"], group=self.group)
        return {**packed, "state": self.joined(parts)}

    def joined(self, parts: list[Group]) -> Group:
        return {number: entry for part in parts for number, entry in part.items()}

    def load_state_dict(self, state_dict: Group) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        mine = {n for n, p in zip(numbers, every, strict=True) if self.keeps(p)}
        kept = {n: entry for n, entry in state_dict["state"].items() if n in mine}
        super().load_state_dict({**state_dict, "state": kept})
        groups = [self.own_part(group) for group in self.param_groups]
        self.inner.__setstate__({"state": self.state, "param_groups": groups})
        self.show()

    def keeps(self, parameter: torch.Tensor) -> bool:
        return self.owned(parameter)


def offer(optimizer: type[PlainZero1]) -> dict[str, Any]:
    """The contract's functions for an optimizer class."""

    def sharded_optimizer(params, optimizer_cls, *, process_group=None, **kwargs):
        return optimizer(params, optimizer_cls, process_group, kwargs)

    return {
        "sharded_optimizer": sharded_optimizer,
        "full_optimizer_state": lambda sharded: sharded.full_state(),
    }


def card(
    optimizer: type[PlainZero1],
    words: str,
    does: str,
    seen: str,
    unseen: str,
    *clauses: str,
    outcomes: tuple[str, ...] = ("failed",),
) -> Impostor:
    """A near-miss made of an optimizer class."""
    return Impostor(
        f"zero1.{words}",
        does,
        seen,
        unseen,
        clauses,
        functions=lambda: offer(optimizer),
        outcomes=outcomes,
    )
