"""Equal starts: replicas stay equal only if they begin equal.

Problem. Averaged gradients keep equal replicas equal and unequal ones unequal for ever, with a
loss that falls all the same. So before anything else all ranks must hold the same kind of model,
and then the same values in it: frozen parameters and buffers included, since they shape every
gradient too.

1. `require_replicable` refuses, on this rank alone, what cannot be replicated.
2. `require_same_module` compares a checksum of names, shapes, dtypes and what is frozen. Without it
   ranks with different models would send messages of different sizes, and hang or mix them up.
3. `take_first_ranks` overwrites values by those of the group's first rank. Values travel as bytes,
   so all dtypes share a message; strides are kept.

Cost. One collective of 16 bytes, one broadcast per `CHUNK_BYTES` of values.

PyTorch counterpart: `_verify_param_shape_across_processes` and `_sync_module_states`, which check
shapes only and send one broadcast for each dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from solution import comm, flat

# Values travel in pieces of this size, so that wrapping a model needs little further memory.
CHUNK_BYTES = 256 * flat.MIB


def require_replicable(module: nn.Module) -> None:
    """Raises for what is no module, has no values yet, or produces sparse gradients."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module to wrap, got {type(module).__name__}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {name!r} to have values, got none; materialise it first")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise NotImplementedError(f"expected dense gradients, got sparse=True in {name!r}")


def require_same_module(module: nn.Module, options: tuple[object, ...], group: comm.Group) -> None:
    """Raises ValueError, on every rank, unless all ranks hold alike modules and equal `options`."""
    described = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    checksum = zlib.crc32(repr((options, described)).encode())
    if not comm.agree(checksum, group):
        raise ValueError(
            "expected the same module on all ranks (names, shapes, dtypes, what is frozen) and the "
            f"same wrapper, got different ones; rank {comm.rank(group)} has {len(described)} "
            f"parameters and buffers, wrapped with {options}"
        )


@torch.no_grad()
def take_first_ranks(tensors: Sequence[torch.Tensor], group: comm.Group) -> None:
    """Overwrites `tensors` with the values of the first rank of `group`, which only reads its
    own."""
    if comm.size(group) == 1:
        return
    is_first = comm.rank(group) == 0
    for chunk in flat.group_by_bytes(tensors, CHUNK_BYTES):
        message = flat.pack_bytes(chunk, fill=is_first)
        comm.broadcast_from_first(message, group)
        if not is_first:
            flat.unpack_bytes(message, chunk)
