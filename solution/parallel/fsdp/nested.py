"""Tensors inside of whatever a module takes and gives: containers and dataclasses, however deep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

Change = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(change: Change, values: Any) -> Any:
    """`values` with every tensor replaced by `change(tensor)`; everything else is kept as it is."""

    if isinstance(values, torch.Tensor):
        return change(values)
    if type(values) is tuple:  # of arguments, mostly; PyTorch's walk takes longer than a layer
        found = tuple(map_tensors(change, value) for value in values)
        return found if any(a is not b for a, b in zip(found, values, strict=True)) else values
    if values == {}:
        return values

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found = {
                field.name: map_tensors(change, getattr(leaf, field.name))
                for field in dataclasses.fields(leaf)
                if field.init
            }
            # An object that holds no tensor stays the object that it is.
            if any(found[name] is not getattr(leaf, name) for name in found):
                return dataclasses.replace(leaf, **found)
        return leaf

    changed = [False]

    def noting(leaf: Any) -> Any:
        found = at_leaf(leaf)
        changed[0] = changed[0] or found is not leaf
        return found

    mapped = tree_map(noting, values)
    return mapped if changed[0] else values


def differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors in `values` that require a gradient, in the order in which `map_tensors` goes."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, values)
    return found


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in `dtype`; everything else, and all for None, as it is."""
    if dtype is None:
        return values
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)
