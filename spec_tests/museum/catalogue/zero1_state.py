"""Near-misses of the state and the traffic of the sharded optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.museum.card import near_miss
from spec_tests.museum.catalogue.zero1_updates import StepsAlone
from spec_tests.plain.zero1 import PlainZero1


@near_miss(
    "zero1.hides-the-rest", rejected_by=("zero1.state.divided", "zero1.footprint.state-is-a-share")
)
class HidesTheRest(StepsAlone):
    """Keeps the state of all parameters inside, and shows its own part.

    From: A wrapper around a whole optimizer, with a filter in front.
    Unseen: `.state` is what tests look at.
    """

    def show(self):
        super().show()
        self.state = _Part(self)  # type: ignore[assignment]  # as good as the real one to look at

    def exchange(self):
        PlainZero1.exchange(self)


class _Part(dict[Any, Any]):
    """Of the inner optimizer's state, what is owned."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def values(self):
        owners, rank = self.optimizer.owners, self.optimizer.rank()
        inner = self.optimizer.inner.state
        return [entry for p, entry in inner.items() if owners[p] == rank]


@near_miss("zero1.one-for-all", rejected_by="zero1.state.balanced")
class OneForAll(PlainZero1):
    """The first rank owns everything.

    From: The least loaded rank is looked up in a list that nobody updates.
    Unseen: The parts add up to the whole.
    """

    def deal(self, parameters):
        self.owners |= dict.fromkeys(parameters, 0)


@near_miss("zero1.deals-each-group-anew", rejected_by="zero1.state.balanced")
class DealsEachGroupAnew(PlainZero1):
    """Deals a group that is added as if nobody had anything yet.

    From: Loads that are a variable of the method, where the constructor has one group.
    Unseen: Groups are added one by one by those who unfreeze layer after layer.
    """

    def deal(self, parameters):
        self.loads = [0] * len(self.loads)
        super().deal(parameters)


@near_miss("zero1.eight-owners", rejected_by="zero1.footprint.any-world-size")
class EightOwners(PlainZero1):
    """Deals parameters to the first eight ranks only.

    From: The number of devices of one machine where the number of ranks belongs.
    Unseen: No test has more than eight ranks.
    """

    def deal(self, parameters):
        self.loads = self.loads[:8]
        super().deal(parameters)


@near_miss("zero1.deals-in-turn", rejected_by="zero1.state.evenly-balanced")
class DealsInTurn(PlainZero1):
    """Deals parameters in turn: all matrices to one rank, all biases to the other.

    From: `index % world_size`; the usual solution of CS336's exercise.
    Unseen: As many parameters on every rank.
    """

    def deal(self, parameters):
        for number, parameter in enumerate(parameters):
            self.owners[parameter] = number % self.size()


@near_miss("zero1.drops-others-state", rejected_by="zero1.state.full-equals-unsharded")
class DropsOthersState(PlainZero1):
    """The full state is the rank's own part.

    From: rank 0 saves its state dict, as with a plain optimizer.
    Unseen: It loads without a word, and training goes on with cold moments.
    """

    def joined(self, parts):
        return parts[self.rank()]


@near_miss("zero1.state-on-the-first-rank", rejected_by="zero1.state.full-equals-unsharded")
class StateOnTheFirstRank(PlainZero1):
    """Only the first rank has the full state.

    From: `consolidate_state_dict(to=0)`.
    Unseen: Tests read it on rank 0.
    """

    def joined(self, parts):
        return super().joined(parts) if self.rank() == 0 else {}


@near_miss("zero1.steps-to-see-keys", rejected_by="zero1.state.export-is-inert")
class StepsToSeeKeys(PlainZero1):
    """Steps a cold optimizer to learn what its state will be.

    From: pytorch issue 164929, in `torch.distributed.checkpoint`.
    Unseen: A save before the first step is rare, and only the step count is off.
    """

    def full_state(self):
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


@near_miss("zero1.keeps-all-it-loads", rejected_by="zero1.state.divided-after-load")
class KeepsAllItLoads(PlainZero1):
    """Keeps the whole state that it is given.

    From: torch.optim's own `load_state_dict`, inherited.
    Unseen: Weights are right; memory grows after a restart only.
    """

    def keeps(self, parameter):
        return True


@near_miss(
    "zero1.loads-by-own-numbers",
    rejected_by=("zero1.state.resumes-at-any-size", "zero1.state.round-trip"),
)
class LoadsByOwnNumbers(PlainZero1):
    """Takes the first entries of a loaded state for its own.

    From: The inner optimizer numbers what it has from zero.
    Unseen: At the world size of the save, with its own save, it fits.
    """

    def load_state_dict(self, state_dict):
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


@near_miss("zero1.loads-moments-only", rejected_by="zero1.state.resumes-at-any-size")
class LoadsMomentsOnly(PlainZero1):
    """Loads moments, and keeps the options that it was constructed with.

    From: Megatron-LM issue 7468: restored options act one step late, or never.
    Unseen: Tests resume at the constructor's rate.
    """

    def load_state_dict(self, state_dict):
        groups = [{**g} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in before.items() if k != "params"})
        self.hand_in()


@near_miss("zero1.saves-its-part", rejected_by="zero1.state.no-partial-state-dict")
class SavesItsPart(PlainZero1):
    """`state_dict()` is the rank's own part.

    From: The method is inherited, and `.state` is divided.
    Unseen: It has all groups, and loads.
    """

    def state_dict(self):
        return torch.optim.Optimizer.state_dict(self)


@near_miss(
    "zero1.sums-with-zeros",
    rejected_by=("zero1.traffic.one-copy-per-step", "zero1.traffic.any-world-size"),
)
class SumsWithZeros(PlainZero1):
    """Sums weights, with zeros for what others own.

    From: An all-reduce in place of a gather: no owners to keep track of.
    Unseen: The numbers are right.
    """

    @torch.no_grad()
    def take(self, parameter, owner):
        whole = parameter.detach().contiguous().clone()
        if owner != self.rank():
            whole.zero_()
        dist.all_reduce(whole, group=self.group)
        parameter.copy_(whole)


@near_miss("zero1.asks-before-sending", rejected_by="zero1.traffic.at-most-one-message-each")
class AsksBeforeSending(PlainZero1):
    """Sends the size of each parameter before it.

    From: A generic function that sends tensors of any shape.
    Unseen: A few bytes more.
    """

    def take(self, parameter, owner):
        dist.broadcast(torch.tensor(parameter.numel()), group=self.group, group_src=owner)
        super().take(parameter, owner)


@near_miss(
    "zero1.own-first",
    rejected_by="zero1.traffic.same-order-on-all-ranks",
    outcomes=("failed", "hang", "died"),
)
class OwnFirst(PlainZero1):
    """Sends its own parameters before it takes the others'.

    From: `for p in own: broadcast(p)`, and then the rest.
    Unseen: Sizes that agree by accident.
    """

    def exchange(self):
        for parameter, owner in sorted(
            self.owners.items(), key=lambda item: item[1] != self.rank()
        ):
            self.take(parameter, owner)


@near_miss("zero1.sends-frozen", rejected_by="zero1.traffic.frozen-not-sent")
class SendsFrozen(PlainZero1):
    """Sends frozen parameters in every step.

    From: ZeroRedundancyOptimizer does.
    Unseen: Nothing is wrong but the bytes: with a frozen backbone nearly all of them.
    """


class Overlaps(PlainZero1):
    """Right: all messages at once, each waited for before it is read."""

    @torch.no_grad()
    def exchange(self):
        self.flying: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        for number, (parameter, owner) in enumerate(self.owners.items()):
            whole = self.room(number, parameter)
            whole.copy_(parameter.reshape(-1))
            handle = dist.broadcast(whole, group=self.group, group_src=owner, async_op=True)
            self.flying.append((parameter, whole, handle))
        self.land(len(self.flying))

    def room(self, number, parameter):
        return parameter.new_empty(parameter.numel())

    def land(self, count):
        """Take the first `count` messages in."""
        for parameter, whole, handle in self.flying[:count]:
            self.wait(handle)
            parameter.copy_(whole.view(parameter.shape))
        del self.flying[:count]

    def wait(self, handle):
        handle.wait()


@near_miss("zero1.waits-for-last-only", rejected_by="zero1.schedule.waits-for-every-launch")
class WaitsForLastOnly(Overlaps):
    """Waits for the message that was launched last and takes the others for arrived.

    From: On one NCCL stream it is so; gloo and several streams promise nothing.
    Unseen: Small messages over loopback arrive in the order of their launch.
    """

    def land(self, count):
        if self.flying:
            self.flying[-1][2].wait()
        super().land(count)

    def wait(self, handle):
        pass


@near_miss("zero1.double-buffers-in-flight", rejected_by="zero1.schedule.same-weights")
class DoubleBuffers(Overlaps):
    """Fills a buffer again while the message before the last may still be under way.

    From: Double buffering without a wait: 'two in flight are enough'.
    Unseen: A small message takes less time than the copy of the next parameter.
    """

    def room(self, number, parameter):
        rooms = self.__dict__.setdefault("rooms", {})
        key = (parameter.dtype, number % 2)
        if key not in rooms:
            largest = max(p.numel() for p in self.owners)
            rooms[key] = parameter.new_empty(largest)
        if len(self.flying) > 1:
            self.is_early = True
            self.land(1)
            self.is_early = False
        return rooms[key][: parameter.numel()]

    is_early = False

    def wait(self, handle):
        if not self.is_early:
            handle.wait()


@near_miss("zero1.iterates-twice", rejected_by="zero1.groups.any-iterable")
class IteratesTwice(PlainZero1):
    """Goes through the parameters of a group before the optimizer has made a list of them.

    From: `for p in group["params"]` at the head of `add_param_group`.
    Unseen: Lists can be gone through twice.
    """

    def add_param_group(self, param_group):
        self.num_parameters = sum(1 for _ in param_group["params"])
        super().add_param_group(param_group)


@near_miss("zero1.shortens-callers-groups", rejected_by="zero1.groups.caller-keeps-theirs")
class ShortensCallersGroups(PlainZero1):
    """Writes its own part into the group that the caller gave.

    From: `param_group["params"] = local_params` before `super().add_param_group`.
    Unseen: Most callers build their groups in the call.
    """

    def add_param_group(self, param_group):
        super().add_param_group({**param_group, "params": list(param_group["params"])})
        param_group["params"] = self.own_part(self.param_groups[-1])["params"]


@near_miss(
    "zero1.shows-no-options", rejected_by=("zero1.groups.rate-by-default", "zero1.groups.complete")
)
class ShowsNoOptions(PlainZero1):
    """Leaves the options in the inner optimizer.

    From: `super().__init__(params, {})`, and nothing after it.
    Unseen: Nobody reads a rate that nobody changes.
    """

    def show(self):
        self.state = self.inner.state
