"""The whole state of an optimizer whose parts lie on different ranks, on every rank.

1. Every rank describes what it has: key, shape and dtype of each tensor; plain values themselves.
2. One rank after another broadcasts its tensors, a few large messages each, and the others unpack
   them where the descriptions said.

Pickling the tensors would be shorter, and would hold the state three times over. Copies lie on the
CPU, where a checkpoint wants them.

PyTorch counterpart: `ZeroRedundancyOptimizer.consolidate_state_dict`, which pickles every part to
one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solution import comm, flat

__all__ = ["gathered"]

State = dict[Any, dict[str, Any]]  # of each parameter, by its number: what a state dict holds

CHUNK_BYTES = 256 * flat.MIB


@dataclass(frozen=True)
class _Described:
    """A tensor that is yet to arrive."""

    shape: torch.Size
    dtype: torch.dtype


def gathered(part: State, group: comm.Group, device: torch.device) -> State:
    """The parts of all ranks of `group` together, on every rank; all call it.

    Args:
        part: what this rank has; no other rank has any of it.
        device: what the group's backend can send from.
    """
    own = _each_value(part, _copied)
    told = comm.gather_objects(_each_value(own, _description), group)
    whole: State = {}
    for source, described in enumerate(told):
        entries = own if source == comm.rank(group) else _each_value(described, _space)
        _send([v for entry in entries.values() for v in entry.values()], source, group, device)
        whole |= entries
    return dict(sorted(whole.items()))


def _send(values: Sequence[Any], source: int, group: comm.Group, device: torch.device) -> None:
    """Fills the tensors among `values` with those of rank `source`; blocks."""
    is_source = source == comm.rank(group)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for chunk in flat.group_by_bytes(tensors, CHUNK_BYTES):
        message = flat.pack_bytes(chunk, fill=is_source).to(device)
        comm.broadcast(message, source, group).wait()
        if not is_source:
            flat.unpack_bytes(message, chunk)


def _each_value(state: State, change: Callable[[Any], Any]) -> State:
    return {
        index: {key: change(value) for key, value in entry.items()}
        for index, entry in state.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _description(value: Any) -> Any:
    return _Described(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _space(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, _Described) else value
