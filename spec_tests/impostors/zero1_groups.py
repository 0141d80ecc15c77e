"""Near-misses of the sharded optimizer's parameter groups and process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spec_tests.impostors.plain_zero1 import Group, PlainZero1, card


class FirstOptionsForAll(PlainZero1):
    def own_part(self, group: Group) -> Group:
        first = self.param_groups[0]
        return {**first, "params": super().own_part(group)["params"]}

    def hand_in(self) -> None:
        pass


class CopiesOptionsOnce(PlainZero1):
    def hand_in(self) -> None:
        pass


class HandsInRatesOnly(PlainZero1):
    def hand_in(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = outer["lr"]


class DropsEmptyGroups(PlainZero1):
    """Leaves out groups of which it has nothing, and pairs the rest by position."""

    def hand_in(self) -> None:
        kept = [g for g in self.inner.param_groups if g["params"]]
        for outer, inner in zip(self.param_groups, kept, strict=False):
            inner.update({k: v for k, v in outer.items() if k != "params"})


class ForgetsLateGroups(PlainZero1):
    def add_param_group(self, param_group: Group) -> None:
        if self.inner is None:
            super().add_param_group(param_group)
        else:
            torch.optim.Optimizer.add_param_group(self, param_group)

    def hand_in(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=False):
            inner.update({k: v for k, v in outer.items() if k != "params"})


class ShowsOwnGroups(PlainZero1):
    def show(self) -> None:
        super().show()
        self.param_groups = self.inner.param_groups


class ClearsOwnGradients(PlainZero1):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class OwnersOfTheWorld(PlainZero1):
    def size(self) -> int:
        return dist.get_world_size()

    def rank(self) -> int:
        return dist.get_rank()

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        whole = parameter.detach().contiguous()
        dist.broadcast(whole, src=owner)
        parameter.copy_(whole)


IMPOSTORS = (
    card(
        FirstOptionsForAll,
        "first-options-for-all",
        "Updates every group with the first group's options.",
        "`optimizer_cls(own_parameters, **kwargs)`: the groups are flattened away.",
        "Tests have one group.",
        "zero1.groups.own-options",
    ),
    card(
        CopiesOptionsOnce,
        "copies-options-once",
        "Copies options at construction.",
        "pytorch issue 60284: the inner optimizer's groups go stale.",
        "Tests train at a constant rate.",
        "zero1.groups.live",
        "zero1.groups.schedulers",
    ),
    card(
        HandsInRatesOnly,
        "hands-in-rates-only",
        "Hands on a changed rate, and no other option.",
        "The fix of a stale rate, for the rate.",
        "Schedules of decay and momentum are rare.",
        "zero1.groups.live",
    ),
    card(
        DropsEmptyGroups,
        "drops-empty-groups",
        "Pairs outer groups with those inner ones that are not empty on this rank.",
        "`if own: groups.append(...)`, and options copied by position.",
        "A group that has parameters on every rank.",
        "zero1.groups.own-options",
    ),
    card(
        ForgetsLateGroups,
        "forgets-late-groups",
        "Takes no notice of groups that are added after construction.",
        "The partition is made in the constructor.",
        "Tests add no groups.",
        "zero1.groups.added-later",
    ),
    card(
        ShowsOwnGroups,
        "shows-own-groups",
        "`param_groups` are those of the rank's own part.",
        "`self.param_groups = self.optimizer.param_groups`, to keep schedulers happy.",
        "The first group's rate is the same everywhere.",
        "zero1.groups.complete",
    ),
    card(
        ClearsOwnGradients,
        "clears-own-gradients",
        "`zero_grad` clears the gradients of what it owns.",
        "`zero_grad` is handed to the inner optimizer.",
        "Tests clear through the model.",
        "zero1.groups.zero-grad",
    ),
    card(
        OwnersOfTheWorld,
        "owners-of-the-world",
        "Deals to, and broadcasts over, the world in place of the group.",
        "`dist.get_world_size()` and no group in the broadcast.",
        "Tests have one group.",
        "zero1.group.keeps-to-itself",
        outcomes=("failed", "hang", "died"),
    ),
    card(
        PlainZero1,
        "compares-nothing",
        "Trusts that all ranks were given the same.",
        "ZeroRedundancyOptimizer does, and so does every exercise.",
        "Ranks run the same script.",
        "zero1.refusals.unequal-ranks",
        outcomes=("failed", "hang", "died"),
    ),
)
