"""Preparing on all ranks, or raising on all of them.

Problem. A rank that refuses what the others accept, or that holds another model, leaves the others
waiting in their next collective. So every rank prepares, describes what it has got, and compares.

`send_values` gives all of them the values of one rank. Values travel as bytes, so all dtypes share
a message; strides are kept.

Cost. One collective of 16 bytes for each process group; the descriptions themselves are sent only
if ranks disagree. One broadcast per `CHUNK_BYTES` of values.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch

from solution import comm, flat

CHUNK_BYTES = 256 * flat.MIB  # of values in one message, so that sending needs little memory


def on_all_ranks(
    prepare: Callable[[], Iterable[str]], groups: Sequence[comm.Group], *, expected: str
) -> None:
    """Call `prepare` on all ranks; return only if it succeeds everywhere with the same result.

    Args:
        prepare: returns a description of what this rank holds, one line per part.
        groups: process groups that connect all ranks: one, or those of the dims of a mesh, the
            innermost first.
        expected: what all ranks should have done, for the error message.

    Raises:
        ValueError: the first difference and the rank that has it, on every rank.
        Exception: whatever `prepare` raised on this rank.
    """
    error: Exception | None = None
    try:
        lines = list(prepare())
    except Exception as caught:  # including errors of a caller's function: other ranks wait
        error, lines = caught, [f"the refusal {str(caught)!r}"]
    checksum, is_same = zlib.crc32(repr(lines).encode()), True
    for group in groups:
        # A rank whose first group disagrees still takes part in the second, and tells it.
        is_same = comm.agree(checksum if is_same else -1, group) and is_same
    everyones = [lines]  # of all ranks, in their order in the mesh, if they disagree
    for group in () if is_same else groups:
        everyones = list(itertools.chain.from_iterable(comm.gather_objects(everyones, group)))
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and so to the refused model
    for parts in itertools.zip_longest(*everyones, fillvalue="nothing more"):
        other = next((rank for rank, part in enumerate(parts) if part != parts[0]), None)
        if other is not None:
            raise ValueError(
                f"expected {expected}, got {parts[0]} on rank 0 of the group and {parts[other]} "
                f"on rank {other}"
            )


@torch.no_grad()
def send_values(
    tensors: Sequence[torch.Tensor],
    source: int,
    group: comm.Group,
    *,
    device: torch.device | None = None,
) -> None:
    """Overwrite `tensors`, of any dtypes, with those of rank `source`; all ranks call it.

    Args:
        device: from which the group's backend can send; None is that of the tensors.
    """
    if comm.size(group) == 1:
        return
    is_source = comm.rank(group) == source
    for chunk in flat.group_by_bytes(tensors, CHUNK_BYTES):
        message = flat.pack_bytes(chunk, fill=is_source).to(device=device)
        comm.broadcast(message, source, group).wait()
        if not is_source:
            flat.unpack_bytes(message, chunk)
