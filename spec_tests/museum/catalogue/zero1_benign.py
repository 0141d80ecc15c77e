"""Right but unusual sharded optimizers: every clause up to level `correct` must accept these."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
import torch.distributed as dist

from spec_tests.museum.card import benign
from spec_tests.plain.zero1 import PlainZero1


@benign("benign.zero1-gathers-all")
class GathersAll(PlainZero1):
    """One padded all-gather of everyone's parameters."""

    @torch.no_grad()
    def exchange(self):
        for dtype in dict.fromkeys(p.dtype for p in self.owners):
            shares: list[list[torch.Tensor]] = [[] for _ in range(self.size())]
            for parameter, owner in self.owners.items():
                if parameter.dtype == dtype:
                    shares[owner].append(parameter)
            longest = max(sum(p.numel() for p in share) for share in shares)
            own = torch.zeros(longest, dtype=dtype)
            self.fill(own, shares[self.rank()])
            parts = [torch.empty_like(own) for _ in shares]
            dist.all_gather(parts, own, group=self.group)
            for part, share in zip(parts, shares, strict=True):
                self.read(part, share)

    def fill(self, flat, share):
        offset = 0
        for parameter in share:
            flat[offset : offset + parameter.numel()] = parameter.detach().reshape(-1)
            offset += parameter.numel()

    def read(self, flat, share):
        offset = 0
        for parameter in share:
            parameter.copy_(flat[offset : offset + parameter.numel()].view(parameter.shape))
            offset += parameter.numel()


@benign("benign.zero1-whole-state-dict", also=("zero1.traffic.one-copy*", "zero1.traffic.any-*"))
class WholeStateDict(PlainZero1):
    """`state_dict` is collective, and whole; owners send by point-to-point messages."""

    def state_dict(self):
        return self.full_state()

    @torch.no_grad()
    def take(self, parameter, owner):
        whole = parameter.detach().contiguous()
        if self.rank() == owner:
            for other in range(self.size()):
                if other != owner:
                    dist.send(whole, group=self.group, group_dst=other)
        else:
            dist.recv(whole, group=self.group, group_src=owner)
        parameter.copy_(whole)


@benign("benign.zero1-state-inside")
class StateInside(PlainZero1):
    """Keeps its state in the inner optimizer alone.

    Its own `.state` stays empty: the inner optimizer has it, as in most solutions of CS336.
    """

    def show(self):
        super().show()
        self.state = defaultdict(dict)

    def full_state(self):
        self.state = self.inner.state
        whole = super().full_state()
        self.state = defaultdict(dict)
        return whole


@benign("benign.zero1-elementwise")
class Elementwise(PlainZero1):
    """Cuts every parameter into a stretch for each rank.

    Every parameter is cut into equal stretches, one for each rank, as flat buffers are.

    The inner optimizer has the stretches as parameters of its own; right for optimizers that look
    at each element by itself, and it refuses those that it does not know.
    """

    def __init__(self, params, kind, group, options):
        if not self.takes(kind):
            raise ValueError(f"expected SGD, Adam or AdamW, got {kind.__name__}")
        super().__init__(params, kind, group, options)

    def takes(self, kind):
        return kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

    def deal(self, parameters):
        for parameter in parameters:
            self.owners[parameter] = self.rank()
            stretch = torch.nn.Parameter(self.cut(parameter.detach()).clone())
            self.stretches = {**getattr(self, "stretches", {}), parameter: stretch}

    def cut(self, whole, rank=None):
        flat = whole.reshape(-1)
        length = -(-flat.numel() // self.size())
        start = length * (self.rank() if rank is None else rank)
        return flat[start : start + length]

    def own_part(self, group):
        return {**group, "params": [self.stretches[p] for p in group["params"]]}

    def update(self, closure):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.hand_in()  # what it has set counts in this step
        for parameter, stretch in self.stretches.items():
            gradient = parameter.grad
            stretch.grad = None if gradient is None else self.cut(gradient).clone()
            with torch.no_grad():
                stretch.copy_(self.cut(parameter.detach()))
        super().update(None)
        return loss

    @torch.no_grad()
    def exchange(self):
        for parameter, stretch in self.stretches.items():
            parameter.copy_(self.glued(stretch.detach(), parameter))

    def glued(self, stretch, like):
        length = -(-like.numel() // self.size())
        padded = self.padded(stretch, length - stretch.numel())
        parts = [torch.empty_like(padded) for _ in range(self.size())]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts)[: like.numel()].view(like.shape)

    def padded(self, stretch, number):
        return torch.cat([stretch, stretch.new_zeros(number)])

    def full_state(self):
        every = [p for group in self.param_groups for p in group["params"]]
        state = {
            number: {
                key: self.glued(value, p) if value.dim() else value.clone()
                for key, value in self.inner.state[self.stretches[p]].items()
            }
            for number, p in enumerate(every)
            if self.inner.state.get(self.stretches[p])
        }
        groups, number = [], 0
        for group in self.param_groups:
            numbers = list(range(number, number + len(group["params"])))
            groups.append({**copy.deepcopy({**group, "params": []}), "params": numbers})
            number += len(numbers)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict):
        every = [p for group in self.param_groups for p in group["params"]]
        state = {
            number: {
                key: self.cut(value).clone() if value.dim() else value.clone()
                for key, value in entry.items()
            }
            for number, entry in state_dict["state"].items()
            if number < len(every)
        }
        self.inner.load_state_dict({**state_dict, "state": state})
        self.show()


@benign("benign.zero1-plain")
class Zero1Plain(PlainZero1):
    """The base of the near-misses: a broadcast for each parameter."""
