"""The arithmetic of a reduction, in an order that the schedule chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from spec_tests.rig.sim.faults import SimError
from spec_tests.rig.sim.schedule import Chooser

Reduce = Callable[[Sequence[torch.Tensor], str], torch.Tensor]

_OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    # As C++ compares: a NaN that comes second gets lost, one that comes first stays.
    "MIN": lambda a, b: torch.where(b < a, b, a),
    "MAX": lambda a, b: torch.where(a < b, b, a),
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

_OF_BITS = ("BAND", "BOR", "BXOR")

# As torch numbers them; what an operator's kernel gets is the number.
NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def reduce(contributions: Sequence[torch.Tensor], operator: str, chooser: Chooser) -> torch.Tensor:
    """Combine one tensor per rank, in order of rank, into a new tensor.

    Raises:
        SimError: gloo has no such operator, or not for this dtype.
    """
    if operator == "AVG":
        return reduce(contributions, "SUM", chooser) / len(contributions)
    combine, dtype = _OPERATORS.get(operator), contributions[0].dtype
    if combine is None:
        raise SimError(f"gloo does not reduce with {operator}; known: {', '.join(_OPERATORS)}")
    if operator in _OF_BITS and (dtype.is_floating_point or dtype.is_complex):
        raise SimError(f"gloo does not reduce {dtype} with {operator}")
    size, order = len(contributions), chooser.schedule.reduce_order
    if size == 1:
        return contributions[0].clone()
    if order == "ascending" or size == 2 or not contributions[0].is_floating_point():
        return functools.reduce(combine, contributions)
    if order == "random":
        return functools.reduce(combine, [contributions[i] for i in chooser.order(size)])
    return _by_ring(contributions, combine)


def _by_ring(
    contributions: Sequence[torch.Tensor],
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Part i of a tensor begins its round at rank i + 1 and ends it at rank i."""
    size = len(contributions)
    parts = [torch.tensor_split(tensor.reshape(-1), size) for tensor in contributions]
    done = [
        functools.reduce(combine, [parts[(first + 1 + i) % size][first] for i in range(size)])
        for first in range(size)
    ]
    return torch.cat(done).reshape(contributions[0].shape)
