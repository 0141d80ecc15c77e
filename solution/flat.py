"""Flat buffers: cutting tensors into one-dimensional memory and back. No communication.

Problem. A collective costs about as much for one small tensor as for one thousand times its size,
and it wants contiguous memory. So tensors travel in *flat* buffers, and what a tensor looks like
(shape, strides, dtype) is put back by a view.

Invariants. Every element has exactly one place; a plan depends on shapes, dtypes, devices and the
cap only, so ranks that hold equal models make equal plans without talking.
"""

from collections.abc import Sequence

import torch

MIB = 1024 * 1024
ALIGNMENT_BYTES = 64


def plan_buckets(tensors: Sequence[torch.Tensor], *, cap_bytes: float) -> list[list[int]]:
    """Splits `tensors` into buckets, walking them from the last to the first.

    The walk is in reverse order because backward reaches the last layers first. A bucket is closed
    as soon as its bytes *reach* the cap (as PyTorch's `compute_bucket_assignment_by_size`; Li et
    al. 2020, section 3.2.2, in `solution.parallel.ddp`): the tensor that reaches it is
    still inside, so a bucket may exceed the cap by part of one tensor, and a cap of 0 gives one
    bucket per tensor. Different dtypes or devices never share a bucket; each fills its own
    meanwhile.

    Returns:
        Buckets as lists of indices into `tensors`, in the order in which the walk completes them.

    >>> layers = [torch.empty(2) for _ in range(5)]  # 8 bytes each
    >>> plan_buckets(layers, cap_bytes=16)
    [[4, 3], [2, 1], [0]]
    >>> plan_buckets(layers, cap_bytes=0)
    [[4], [3], [2], [1], [0]]
    >>> plan_buckets(layers[:2] + [torch.empty(2, dtype=torch.bfloat16)], cap_bytes=float("inf"))
    [[2], [1, 0]]
    """
    if not cap_bytes >= 0:  # also refuses NaN
        raise ValueError(f"expected a cap of at least 0 bytes, got {cap_bytes}")
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in reversed(range(len(tensors))):
        kind = (tensors[index].dtype, tensors[index].device)
        bucket = filling.setdefault(kind, [])
        bucket.append(index)
        if sum(tensors[member].nbytes for member in bucket) >= cap_bytes:
            buckets.append(filling.pop(kind))
    # A bucket that is still open is complete when its last member, of the smallest index, is.
    buckets.extend(filling.values())
    return sorted(buckets, key=lambda bucket: -bucket[-1])


def strides_for(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides with which `tensor`'s gradient is stored.

    Its own where its elements fill one stretch of memory, in any order of dims; else row-major.
    Every rank derives them from the parameter, never from the gradient that autograd happened to
    produce, so element i of a flat buffer means the same on all ranks.

    >>> strides_for(torch.empty(3, 4).t()), strides_for(torch.empty(3, 4)[:, :2])
    ((1, 4), (2, 1))
    >>> strides_for(torch.empty(3, 1).expand(3, 4))
    (4, 1)
    """
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= length
    return tensor.stride()


def cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the 1-D `flat`, one after another, with the shapes and `strides_for` of `like`.

    >>> [view.shape for view in cut(torch.arange(10.0), [torch.empty(2, 3), torch.empty(4)])]
    [torch.Size([2, 3]), torch.Size([4])]
    """
    views, offset = [], flat.storage_offset()
    for tensor in like:
        views.append(flat.as_strided(tensor.shape, strides_for(tensor), offset))
        offset += tensor.numel()
    assert offset == flat.storage_offset() + flat.numel(), "a flat buffer is covered exactly"
    return views


def aligned_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return offsets of tensors in a flat buffer of their dtype, and its size, in elements.

    Every tensor begins where one allocated by itself could: kernels may compute other last bits,
    or more slowly, on memory that is not aligned.

    >>> aligned_offsets([torch.empty(3), torch.empty(17), torch.empty(2)])
    ([0, 16, 48], 50)
    """
    offsets, end = [], 0
    for tensor in tensors:
        elements = max(1, ALIGNMENT_BYTES // tensor.element_size())
        offsets.append(-(-end // elements) * elements)
        end = offsets[-1] + tensor.numel()
    return offsets, end


def group_by_bytes(tensors: Sequence[torch.Tensor], cap_bytes: int) -> list[list[torch.Tensor]]:
    """Consecutive runs of `tensors` on one device of at most `cap_bytes` (or one larger tensor)."""
    runs: list[list[torch.Tensor]] = []
    run_bytes = 0
    for tensor in tensors:
        fits = bool(runs) and runs[-1][0].device == tensor.device
        if not fits or run_bytes + tensor.nbytes > cap_bytes:
            runs.append([])
            run_bytes = 0
        runs[-1].append(tensor)
        run_bytes += tensor.nbytes
    return runs


def pack_bytes(tensors: Sequence[torch.Tensor], *, fill: bool = True) -> torch.Tensor:
    """One uint8 buffer as large as `tensors` of any dtypes together; `fill` copies their values."""
    sizes = [tensor.nbytes for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for piece, tensor in zip(flat.split(sizes), tensors, strict=True) if fill else ():
        piece.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return flat


def unpack_bytes(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes what `pack_bytes` packed into `tensors`, whatever their strides."""
    pieces = flat.split([tensor.nbytes for tensor in tensors])
    for piece, tensor in zip(pieces, tensors, strict=True):
        # A fresh buffer: a slice of bytes need not be aligned for the dtype.
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        values.view(-1).view(torch.uint8).copy_(piece)
        # Through `.data`: a forward in flight may have saved this tensor (a second forward before
        # one backward), and a value that autograd does not track must not make its backward fail.
        tensor.data.copy_(values)
