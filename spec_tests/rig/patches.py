"""What importing an implementation replaced in torch, by name.

Foreign code may patch what it likes in its own rank; nobody else lives there. But what a clause
observes then passes through the patch, so a reader of the result should know of it. The rig itself
keeps the functions that it needs, bound before the import (see `rank`).
"""

from __future__ import annotations

import builtins
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

_WATCHED: dict[str, Any] = {
    "builtins": builtins,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.distributed": dist,
    "torch.nn.Module": nn.Module,
    "torch.nn.functional": nn.functional,
    "torch.optim.Optimizer": Optimizer,
}

Attributes = dict[str, dict[str, Any]]


def attributes() -> Attributes:
    """Everything that these modules and classes hold now."""
    return {name: dict(vars(holder)) for name, holder in _WATCHED.items()}


def replaced(before: Attributes) -> tuple[str, ...]:
    """Public names that hold something else than they did; what was added counts for nothing."""
    return tuple(
        f"{holder}.{name}"
        for holder, names in before.items()
        for name, old in names.items()
        if (not name.startswith("_") or name in ("__call__", "__init__"))
        and vars(_WATCHED[holder]).get(name) is not old
    )
