"""Who owns which parameter, decided by every rank for itself, and checked against the others.

Problem. When each parameter is updated by one rank only, all ranks must have the same idea of who
that is, and nobody should own much more than the others. Both follow from the parameters' sizes and
order alone, so nothing needs to be sent; but a rank that built another model, or got another
learning rate, would go wrong in silence or hang the rest, so what they hold is compared once.

1. `Owners.deal`: the largest parameter first, each to the rank that has the fewest bytes so far.
   Parameters that train come before frozen ones, which have no state. The largest share then
   exceeds the mean share by less than the largest parameter (Graham 1969, "Bounds on
   Multiprocessing Timing Anomalies": longest processing time first). What was dealt once stays.
2. `together`: each rank does its part and describes what it got; an error on one rank, or a
   description that differs, is an error on all of them.

PyTorch counterpart: the same greedy partition in `ZeroRedundancyOptimizer`, which compares nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution import comm

Group = dict[str, Any]  # a parameter group of an optimizer


class Owners:
    """Parameter to rank.

    Attributes:
        of: the owner of each parameter, in the order in which they were dealt.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.of: dict[torch.Tensor, int] = {}
        self._rank = rank
        self._load_bytes = [0] * num_ranks

    def deal(self, groups: Sequence[Group]) -> None:
        """Give every parameter of `groups` an owner.

        Raises:
            ValueError: one that cannot be sent in place of another; none was dealt then.
        """
        named = {p: name for group in groups for p, name in _named(group)}
        _require_plain(named, self.of)
        new = list(named)
        for parameter in sorted(new, key=lambda p: (not p.requires_grad, -p.nbytes)):
            owner = self._load_bytes.index(min(self._load_bytes))
            self.of[parameter] = owner
            self._load_bytes[owner] += parameter.nbytes

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget what `deal` did with these."""
        for parameter in parameters:
            owner = self.of.pop(parameter, None)
            if owner is not None:
                self._load_bytes[owner] -= parameter.nbytes

    def are_me(self, parameter: torch.Tensor) -> bool:
        """Whether this rank owns `parameter`."""
        return self.of.get(parameter) == self._rank

    def own_part(self, group: Group) -> Group:
        """The group with this rank's parameters only."""
        mine = [parameter for parameter in group["params"] if self.are_me(parameter)]
        return {**options(group), "params": mine}


def options(group: Group) -> Group:
    """What a parameter group says about its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def together(prepare: Callable[[], Sequence[Group]], group: comm.Group) -> None:
    """Runs `prepare` on all ranks of `group`; the groups that it returns must be alike.

    Raises:
        ValueError: on all ranks, naming what differs; or this rank's own error.
    """
    rank = comm.rank(group)
    error, described = None, []
    try:
        described = _described(prepare())
    except Exception as caught:
        error = caught
    reason = None if error is None else f"{type(error).__name__}: {error}"
    told = comm.gather_objects((reason, described), group)
    if error is not None:
        raise error
    for other, (failure, _) in enumerate(told):
        if failure is not None:
            raise ValueError(f"rank {rank}: rank {other} cannot take part: {failure}")
    for lines in itertools.zip_longest(*(lines for _, lines in told), fillvalue="nothing more"):
        other = next((r for r, line in enumerate(lines) if line != lines[0]), 0)
        if other:
            raise ValueError(
                f"rank {rank}: expected the same parameters and options on all ranks, got "
                f"{lines[0]} on rank 0 and {lines[other]} on rank {other}; build the same model "
                "and the same parameter groups everywhere"
            )


def _described(groups: Sequence[Group]) -> list[str]:
    """One line for each group and parameter, equal on ranks that fit together."""
    lines = []
    for number, group in enumerate(groups):
        plain = {
            key: value
            for key, value in sorted(options(group).items())
            if isinstance(value, bool | int | float | str | tuple)
        }
        lines.append(f"group {number} with {plain}")
        for parameter, name in _named(group):
            lines.append(
                f"{name} of group {number}: {parameter.dtype} {tuple(parameter.shape)}, "
                f"requires_grad={parameter.requires_grad}"
            )
    return lines


def _named(group: Group) -> list[tuple[torch.Tensor, str]]:
    """Each parameter with its name, where the caller gave names, else its number in the group."""
    names = group.get("param_names") or range(len(group["params"]))
    return [(p, f"parameter {name!r}") for name, p in zip(names, group["params"], strict=True)]


def _require_plain(named: Mapping[torch.Tensor, str], others: Iterable[torch.Tensor]) -> None:
    addresses = {p.data_ptr() for p in others if p.numel()}
    for parameter, where in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {where} to have values, got none; materialise it first")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"expected {where} to be a plain tensor, got a DTensor; what is sharded already "
                "has sharded state with the plain optimizer"
            )
        if parameter.numel() and parameter.data_ptr() in addresses:
            raise ValueError(
                f"expected {where} to have memory of its own, got that of another parameter; to "
                "tie them use one Parameter in both places"
            )
        addresses.add(parameter.data_ptr())
