"""Which of a rank's tensors have numbers that are not finite, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Entry, local_of

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def flags(tensors: list[Tensor | None]) -> list[Tensor]:
    """Return a 0-d integer for each tensor: 1 if it is not finite."""
    nothing = torch.zeros((), dtype=torch.int64)
    found, places, parts = [nothing] * len(tensors), [], []
    for place, tensor in enumerate(tensors):
        local = None if tensor is None else local_of(tensor)
        if local is not None and local.layout is torch.sparse_coo:
            local = local._values()
        if local is None or local.dtype not in _FLOATS or not local.numel():
            continue
        if local.untyped_storage().nbytes():  # else freed: a full weight, gathered when needed
            places.append(place)
            parts.append(local)
    norms = torch._foreach_norm(parts, float("inf")) if parts else []
    for place, largest in zip(places, norms, strict=True):
        found[place] = (~largest.isfinite()).to(torch.int64)
    return found


def named(entries: list[Entry], flagged: list[int]) -> list[str]:
    """Return the names of the entries whose flag is set."""
    return [entry.name for entry, flag in zip(entries, flagged, strict=True) if flag]
