"""Near-misses of the state and the traffic of the sharded optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.zero1 import PlainZero1

ZERO1 = Source("spec_tests.plain.zero1")

ZERO1.near_miss(
    "zero1.deals-each-group-anew",
    "zero1.state.balanced",
    '  """The largest first, to whoever has least."""',
    "+ self.loads = [0] * self.size()",
    does="Deals a group that is added as if nobody had anything yet.",
    seen="Loads that are a variable of the method, where the constructor has one group.",
    unseen="Groups are added one by one only when layers are unfrozen in turn.",
)

ZERO1.near_miss(
    "zero1.eight-owners",
    "zero1.footprint.any-world-size",
    '  """The largest first, to whoever has least."""',
    "+ self.loads = self.loads[:8]",
    does="Deals parameters to the first eight ranks only.",
    seen="The number of devices of one machine where the number of ranks belongs.",
    unseen="No test has more than eight ranks.",
)

ZERO1.near_miss(
    "zero1.deals-in-turn",
    "zero1.state.evenly-balanced",
    "- for parameter in sorted(parameters, key=lambda p: -p.numel()):",
    "-     owner = self.loads.index(min(self.loads))",
    "+ for number, parameter in enumerate(parameters):",
    "+     owner = number % self.size()",
    does="Deals parameters in turn: all matrices to one rank, all biases to the other.",
    seen="`index % world_size`; the usual solution of CS336's exercise.",
    unseen="As many parameters on every rank.",
)

ZERO1.near_miss(
    "zero1.drops-others-state",
    "zero1.state.full-equals-unsharded",
    "- state = {number: entry for part in parts for number, entry in part.items()}",
    "+ state = parts[self.rank()]",
    does="The full state is the rank's own part.",
    seen="rank 0 saves its state dict, as with a plain optimizer.",
    unseen="It loads without a word, and training goes on with cold moments.",
)


@near_miss("zero1.steps-to-see-keys", rejected_by="zero1.state.export-is-inert")
class StepsToSeeKeys(PlainZero1):
    """Steps a cold optimizer to learn the names in its state.

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


ZERO1.near_miss(
    "zero1.keeps-all-it-loads",
    "zero1.state.divided-after-load",
    "- mine = {n for n, p in zip(numbers, every, strict=True) if self.owned(p)}",
    "+ mine = {*numbers}",
    does="Keeps the whole state that it is given.",
    seen="torch.optim's own `load_state_dict`, inherited.",
    unseen="Weights are right; memory grows after a restart only.",
)


@near_miss(
    "zero1.loads-by-own-numbers",
    rejected_by=("zero1.state.resumes-at-any-size", "zero1.state.round-trip"),
)
class LoadsByOwnNumbers(PlainZero1):
    """Takes the first entries of a loaded state for its own.

    From: The inner optimizer numbers its own parameters from zero.
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


ZERO1.near_miss(
    "zero1.loads-moments-only",
    "zero1.state.resumes-at-any-size",
    '- super().load_state_dict({**state_dict, "state": kept})',
    '+ groups = torch.optim.Optimizer.state_dict(self)["param_groups"]',
    '+ super().load_state_dict({"state": kept, "param_groups": groups})',
    does="Loads moments, and keeps the options that it was constructed with.",
    seen="Megatron-LM issue 7468: restored options act one step late, or never.",
    unseen="Tests resume at the constructor's rate.",
)

ZERO1.near_miss(
    "zero1.saves-its-part",
    "zero1.state.no-partial-state-dict",
    '- raise RuntimeError("the state is divided; call full_optimizer_state on all ranks")',
    "+ return torch.optim.Optimizer.state_dict(self)",
    does="`state_dict()` is the rank's own part.",
    seen="The method is inherited, and `.state` is divided.",
    unseen="It has all groups, and loads.",
)

ZERO1.near_miss(
    "zero1.sums-with-zeros",
    ("zero1.traffic.one-copy-per-step", "zero1.traffic.any-world-size"),
    "- whole = parameter.detach().contiguous()",
    "- dist.broadcast(whole, group=self.group, group_src=owner)",
    "+ whole = parameter.detach().clone(memory_format=torch.contiguous_format)",
    "+ if owner != self.rank():",
    "+     whole.zero_()",
    "+ dist.all_reduce(whole, group=self.group)",
    does="Sums weights, with zeros for parameters that others own.",
    seen="An all-reduce in place of a gather: no owners to keep track of.",
    unseen="The numbers are right.",
)

ZERO1.near_miss(
    "zero1.asks-before-sending",
    "zero1.traffic.at-most-one-message-each",
    "  whole = parameter.detach().contiguous()",
    "+ dist.broadcast(torch.tensor(whole.numel()), group=self.group, group_src=owner)",
    does="Sends the size of each parameter before it.",
    seen="A generic function that sends tensors of any shape.",
    unseen="A few bytes more.",
)

ZERO1.near_miss(
    "zero1.own-first",
    "zero1.traffic.same-order-on-all-ranks",
    "- for parameter, owner in self.owners.items():",
    "+ for parameter, owner in sorted(self.owners.items(), key=lambda i: i[1] != self.rank()):",
    does="Sends its own parameters before it takes the others'.",
    seen="`for p in own: broadcast(p)`, and then the rest.",
    unseen="Sizes that agree by accident.",
    outcomes=("failed", "hang", "died"),
)

ZERO1.near_miss(
    "zero1.sends-frozen",
    "zero1.traffic.frozen-not-sent",
    does="Sends frozen parameters in every step.",
    seen="ZeroRedundancyOptimizer does.",
    unseen="Nothing is wrong but the bytes: with a frozen backbone nearly all of them.",
)


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


ZERO1.near_miss(
    "zero1.iterates-twice",
    "zero1.groups.any-iterable",
    "  def add_param_group(self, param_group: Group) -> None:",
    '+     self.num_parameters = sum(1 for _ in param_group["params"])',
    does="Goes through the parameters of a group before the optimizer has made a list of them.",
    seen='`for p in group["params"]` at the head of `add_param_group`.',
    unseen="Lists can be gone through twice.",
)

ZERO1.near_miss(
    "zero1.shortens-callers-groups",
    "zero1.groups.caller-keeps-theirs",
    "- super().add_param_group(param_group)",
    '- self.deal(self.param_groups[-1]["params"])',
    '+ super().add_param_group({**param_group, "params": list(param_group["params"])})',
    '+ self.deal(self.param_groups[-1]["params"])',
    '+ param_group["params"] = self.own_part(self.param_groups[-1])["params"]',
    does="Writes its own part into the group that the caller gave.",
    seen='`param_group["params"] = local_params` before `super().add_param_group`.',
    unseen="Most callers build their groups in the call.",
)

ZERO1.near_miss(
    "zero1.shows-no-options",
    ("zero1.groups.rate-by-default", "zero1.groups.complete"),
    "- for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):",
    '-     outer.update({k: v for k, v in inner.items() if k != "params"})',
    does="Leaves the options in the inner optimizer.",
    seen="`super().__init__(params, {})`, and nothing after it.",
    unseen="Nobody reads a rate that nobody changes.",
)
