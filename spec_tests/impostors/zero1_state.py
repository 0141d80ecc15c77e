"""Near-misses of the sharded optimizer's state and traffic: the weights are right."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.impostors.plain_zero1 import Group, PlainZero1, card
from spec_tests.impostors.zero1_updates import StepsAlone


class HidesTheRest(StepsAlone):
    """Steps everything, shows its own part, and exchanges for show."""

    def show(self) -> None:
        super().show()
        self.state = _Part(self)  # type: ignore[assignment]  # as good as the real one to look at

    def exchange(self) -> None:
        PlainZero1.exchange(self)


class _Part(dict[Any, Any]):
    """Of the inner optimizer's state, what is owned."""

    def __init__(self, optimizer: PlainZero1) -> None:
        super().__init__()
        self.optimizer = optimizer

    def values(self) -> Any:
        owners, rank = self.optimizer.owners, self.optimizer.rank()
        inner = self.optimizer.inner.state
        return [entry for p, entry in inner.items() if owners[p] == rank]


class OneForAll(PlainZero1):
    def deal(self, parameters: list[torch.Tensor]) -> None:
        self.owners |= dict.fromkeys(parameters, 0)


class EightOwners(PlainZero1):
    """Deals to one machine's worth of ranks."""

    def deal(self, parameters: list[torch.Tensor]) -> None:
        self.loads = self.loads[:8]
        super().deal(parameters)


class DealsInTurn(PlainZero1):
    """One parameter to each rank in turn."""

    def deal(self, parameters: list[torch.Tensor]) -> None:
        for number, parameter in enumerate(parameters):
            self.owners[parameter] = number % self.size()


class DropsOthersState(PlainZero1):
    def joined(self, parts: list[Group]) -> Group:
        return parts[self.rank()]


class StateOnTheFirstRank(PlainZero1):
    def joined(self, parts: list[Group]) -> Group:
        return super().joined(parts) if self.rank() == 0 else {}


class NumbersPerGroup(PlainZero1):
    def full_state(self) -> Group:
        whole = super().full_state()
        for group in whole["param_groups"]:
            group["params"] = list(range(len(group["params"])))
        return whole


class LosesCounters(PlainZero1):
    def joined(self, parts: list[Group]) -> Group:
        whole = super().joined(parts)
        return {
            number: {key: value for key, value in entry.items() if value.dim()}
            for number, entry in whole.items()
        }


class StepsToSeeKeys(PlainZero1):
    """Steps a cold optimizer on zero gradients, to learn what its state will be."""

    def full_state(self) -> Group:
        if not self.state:
            kept = {p: (p.grad, p.detach().clone()) for p in self.owners}
            for parameter in self.owners:
                parameter.grad = torch.zeros_like(parameter)
            self.inner.step()
            with torch.no_grad():
                for parameter, (gradient, value) in kept.items():
                    parameter.copy_(value)
                    parameter.grad = gradient
        return super().full_state()


class KeepsAllItLoads(PlainZero1):
    def keeps(self, parameter: torch.Tensor) -> bool:
        return True


class LoadsByOwnNumbers(PlainZero1):
    """Takes the first entries for its own: numbers count over what a rank has."""

    def load_state_dict(self, state_dict: Group) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        own = [number for number, p in enumerate(every) if self.owned(p)]
        entries = list(state_dict["state"].values())
        state = {n: copy.deepcopy(e) for n, e in zip(own, entries, strict=False)}
        for number, entry in state.items():
            for key, value in entry.items():
                if value.dim():
                    fitting = torch.zeros(every[number].numel(), dtype=value.dtype)
                    count = min(fitting.numel(), value.numel())
                    fitting[:count] = value.reshape(-1)[:count]
                    entry[key] = fitting.view(every[number].shape)
        super().load_state_dict({**state_dict, "state": state})


class LoadsMomentsOnly(PlainZero1):
    def load_state_dict(self, state_dict: Group) -> None:
        groups = [{**g} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in before.items() if k != "params"})
        self.hand_in()


class SavesItsPart(PlainZero1):
    def state_dict(self) -> Group:
        return torch.optim.Optimizer.state_dict(self)


class SumsWithZeros(PlainZero1):
    @torch.no_grad()
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        whole = parameter.detach().contiguous().clone()
        if owner != self.rank():
            whole.zero_()
        dist.all_reduce(whole, group=self.group)
        parameter.copy_(whole)


class AsksBeforeSending(PlainZero1):
    def take(self, parameter: torch.Tensor, owner: int) -> None:
        dist.broadcast(torch.tensor(parameter.numel()), group=self.group, group_src=owner)
        super().take(parameter, owner)


class OwnFirst(PlainZero1):
    """Sends its own parameters first, and takes the others' afterwards."""

    def exchange(self) -> None:
        for parameter, owner in sorted(
            self.owners.items(), key=lambda item: item[1] != self.rank()
        ):
            self.take(parameter, owner)


IMPOSTORS = (
    card(
        HidesTheRest,
        "hides-the-rest",
        "Keeps the state of all parameters inside, and shows its own part.",
        "A wrapper around a whole optimizer, with a filter in front.",
        "`.state` is what tests look at.",
        "zero1.state.divided",
        "zero1.footprint.state-is-a-share",
    ),
    card(
        OneForAll,
        "one-for-all",
        "The first rank owns everything.",
        "The least loaded rank is looked up in a list that nobody updates.",
        "The parts add up to the whole.",
        "zero1.state.balanced",
    ),
    card(
        DealsInTurn,
        "deals-in-turn",
        "Deals parameters in turn: all matrices to one rank, all biases to the other.",
        "`index % world_size`; the usual solution of CS336's exercise.",
        "As many parameters on every rank.",
        "zero1.state.balanced",
    ),
    card(
        DropsOthersState,
        "drops-others-state",
        "The full state is the rank's own part.",
        "rank 0 saves its state dict, as with a plain optimizer.",
        "It loads without a word, and training goes on with cold moments.",
        "zero1.state.full-equals-unsharded",
    ),
    card(
        StateOnTheFirstRank,
        "state-on-the-first-rank",
        "Only the first rank has the full state.",
        "`consolidate_state_dict(to=0)`.",
        "Tests read it on rank 0.",
        "zero1.state.full-equals-unsharded",
    ),
    card(
        NumbersPerGroup,
        "numbers-per-group",
        "Numbers parameters anew in each group.",
        "`enumerate(group['params'])`.",
        "With one group the numbers are right.",
        "zero1.state.full-equals-unsharded",
    ),
    card(
        LosesCounters,
        "loses-counters",
        "The full state has no step counts.",
        "Tensors without dims do not fit into flat buffers.",
        "Moments are there; the bias correction starts anew.",
        "zero1.state.full-equals-unsharded",
        outcomes=("failed",),
    ),
    card(
        StepsToSeeKeys,
        "steps-to-see-keys",
        "Steps a cold optimizer to learn what its state will be.",
        "pytorch issue 164929, in `torch.distributed.checkpoint`.",
        "A save before the first step is rare, and only the step count is off.",
        "zero1.state.export-is-inert",
    ),
    card(
        KeepsAllItLoads,
        "keeps-all-it-loads",
        "Keeps the whole state that it is given.",
        "torch.optim's own `load_state_dict`, inherited.",
        "Weights are right; memory grows after a restart only.",
        "zero1.state.divided-after-load",
    ),
    card(
        LoadsByOwnNumbers,
        "loads-by-own-numbers",
        "Takes the first entries of a loaded state for its own.",
        "The inner optimizer numbers what it has from zero.",
        "At the world size of the save, with its own save, it fits.",
        "zero1.state.resumes-at-any-size",
        "zero1.state.round-trip",
    ),
    card(
        LoadsMomentsOnly,
        "loads-moments-only",
        "Loads moments, and keeps the options that it was constructed with.",
        "Megatron-LM issue 7468: restored options act one step late, or never.",
        "Tests resume at the constructor's rate.",
        "zero1.state.resumes-at-any-size",
    ),
    card(
        SavesItsPart,
        "saves-its-part",
        "`state_dict()` is the rank's own part.",
        "The method is inherited, and `.state` is divided.",
        "It has all groups, and loads.",
        "zero1.state.no-partial-state-dict",
    ),
    card(
        SumsWithZeros,
        "sums-with-zeros",
        "Sums weights, with zeros for what others own.",
        "An all-reduce in place of a gather: no owners to keep track of.",
        "The numbers are right.",
        "zero1.traffic.one-copy-per-step",
        "zero1.traffic.any-world-size",
    ),
    card(
        EightOwners,
        "eight-owners",
        "Deals parameters to the first eight ranks only.",
        "The number of devices of one machine where the number of ranks belongs.",
        "No test has more than eight ranks.",
        "zero1.footprint.any-world-size",
    ),
    card(
        PlainZero1,
        "sends-frozen",
        "Sends frozen parameters in every step.",
        "ZeroRedundancyOptimizer does.",
        "Nothing is wrong but the bytes: with a frozen backbone nearly all of them.",
        "zero1.traffic.frozen-not-sent",
    ),
    card(
        AsksBeforeSending,
        "asks-before-sending",
        "Sends the size of each parameter before it.",
        "A generic function that sends tensors of any shape.",
        "A few bytes more.",
        "zero1.traffic.at-most-one-message-each",
    ),
    card(
        OwnFirst,
        "own-first",
        "Sends its own parameters before it takes the others'.",
        "`for p in own: broadcast(p)`, and then the rest.",
        "Sizes that agree by accident.",
        "zero1.traffic.same-order-on-all-ranks",
        outcomes=("failed", "hang", "died"),
    ),
)
