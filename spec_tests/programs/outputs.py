"""Outputs of a model: what surrounds the tensor, and how a loss reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    """An output beside a note."""

    y: torch.Tensor
    note: str


@dataclass
class Found:
    """An output in a dataclass."""

    y: torch.Tensor


@dataclass
class Late:
    """An output in a field that the constructor does not take."""

    y: torch.Tensor = field(init=False)


def _late(y: torch.Tensor) -> Late:
    found = Late()
    found.y = y
    return found


OUTPUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # how the model gives it, and how the loss reads it
    "tensor": (lambda y: y, lambda found: found),
    "in-a-dict": (lambda y: {"y": y}, lambda found: found["y"]),
    "second-of-two": (lambda y: (y.detach(), [y, None]), lambda found: found[1][0]),
    "in-a-named-tuple": (lambda y: Pair(y, ""), lambda found: found.y),
    "in-a-dataclass": (Found, lambda found: found.y),
    "in-a-late-field": (_late, lambda found: found.y),
    "written-to": (lambda y: y, lambda found: found.mul_(1)),
}
