"""The norms of a rank's tensors, and which of them are not finite, in one pass over each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layout import Entry, local_of

_WIDE = (torch.float64, torch.float32)
_FLOATS = (*_WIDE, torch.bfloat16, torch.float16)


def norms(tensors: list[Tensor | None]) -> list[float]:
    """Return the norm of each tensor's part on this rank, 0 of one that has no number."""
    found = [0.0] * len(tensors)
    parts = [(place, local) for place, t in enumerate(tensors) if (local := _part(t)) is not None]
    for is_wide in (True, False):
        own = [(place, part) for place, part in parts if (part.dtype in _WIDE) is is_wide]
        if own:
            dtype = None if is_wide else torch.float32
            values = torch._foreach_norm([part for _, part in own], 2, dtype=dtype)
            together = torch.stack([v.double().to(values[0].device) for v in values]).tolist()
            for (place, _), value in zip(own, together, strict=True):
                found[place] = value
    return found


def named(entries: list[Entry], tensors: list[Tensor | None], known: list[float]) -> list[str]:
    """Return the names of tensors that are not finite, given their norms.

    The sum of squares may be infinite where no number is.
    """
    doubted = [index for index, value in enumerate(known) if not math.isfinite(value)]
    parts = [(index, _part(tensors[index])) for index in doubted]
    return [entries[i].name for i, p in parts if p is not None and not p.isfinite().all()]


def _part(tensor: Tensor | None) -> Tensor | None:
    local = None if tensor is None else local_of(tensor)
    if local is not None and local.layout is torch.sparse_coo:
        local = local._values()
    if local is None or local.dtype not in _FLOATS or not local.numel():
        return None
    return local if local.untyped_storage().nbytes() else None  # freed: gathered when needed
