"""ZeRO stage 1: the state of the optimizer is divided among the ranks.

Problem: Adam keeps two moments per parameter, and each rank of DDP keeps all of them.

Idea: give each parameter one owner. Only the owner has its state and updates it; the others receive
the new values.

Steps
    1. `add_param_group`: deal parameters out, the largest first, to the rank that has least.
    2. An inner optimizer of the wanted class holds the parameters that this rank owns.
    3. `step`: copy options that were changed outside to the inner groups, step, then broadcast each
       parameter from its owner.
    4. `full_state`: gather the parts; `load_state_dict`: keep what this rank owns.

Cost: state shrinks to about 1/n; a step sends the parameters once, here one blocking broadcast for
each of them.

Paper: Rajbhandari et al. 2020, section 5.1. Differs from ZeroRedundancyOptimizer: the state is
gathered pickled, and groups may be added at any time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

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
        if self.inner is not None:
            self.hand_in()  # what `show` would bring back below
        super().add_param_group(param_group)
        self.deal(self.param_groups[-1]["params"])
        if self.inner is not None:
            self.inner.add_param_group(self.own_part(self.param_groups[-1]))
            self.show()

    def show(self) -> None:
        """What the inner optimizer knows goes outside: defaults, what it counts, its state."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({k: v for k, v in inner.items() if k != "params"})
        self.state = self.inner.state

    # ---------------------------------------------------------------------------------- a step

    def step(self, closure: Any = None) -> Any:
        self.hand_in()
        loss = self.update(closure)
        self.show()
        self.exchange()
        return loss

    def hand_in(self) -> None:
        """Options that were changed outside."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({k: v for k, v in outer.items() if k != "params"})

    def update(self, closure: Any) -> Any:
        if closure is None:
            return self.inner.step()

        def first() -> Any:
            loss = closure()
            self.hand_in()  # what it has set counts in this step
            return loss

        return self.inner.step(first)

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
        state = {number: entry for part in parts for number, entry in part.items()}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: Group) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        mine = {n for n, p in zip(numbers, every, strict=True) if self.owned(p)}
        kept = {n: entry for n, entry in state_dict["state"].items() if n in mine}
        super().load_state_dict({**state_dict, "state": kept})
        groups = [self.own_part(group) for group in self.param_groups]
        self.inner.__setstate__({"state": self.state, "param_groups": groups})
        self.show()

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class of optimizers."""

        def sharded_optimizer(params, optimizer_cls, *, process_group=None, **kwargs):
            return cls(params, optimizer_cls, process_group, kwargs)

        return {
            "sharded_optimizer": sharded_optimizer,
            "full_optimizer_state": lambda sharded: sharded.full_state(),
        }
