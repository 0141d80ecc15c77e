"""Buffers of an operation in flight: where they lie, and whether anybody has touched them."""

from __future__ import annotations

import functools

import torch


class BehindAutograd:
    """A block in which torch neither records gradients nor calls dispatch modes.

    As `torch.no_grad` and `_DisableTorchDispatch` together, in a third of their time: an operation
    enters it twice.
    """

    __slots__ = ("_guard", "_was_on")

    def __enter__(self) -> None:
        self._was_on = torch.is_grad_enabled()
        self._guard = torch._C._DisableTorchDispatch()
        self._guard.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_on)
        self._guard.__exit__(*error)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with what no computation survives: NaN, or the smallest integer."""
    value = _poison_of(tensor.dtype)
    if value is not None:
        tensor.data.fill_(value)


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether nothing has been written to it since."""
    value = _poison_of(tensor.dtype)
    if value is None or tensor.numel() == 0:
        return True
    data = tensor.data
    return bool((data == value).all() if value == value else data.isnan().all())


@functools.cache
def _poison_of(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return None
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same, NaN included."""
    if one.numel() == 0 or torch.equal(one.data, other):
        return True
    return torch.equal(
        one.data.contiguous().view(-1).view(torch.uint8),
        other.contiguous().view(-1).view(torch.uint8),
    )


Extent = tuple[int, int, int]
"""Of a tensor in memory: its storage, its first byte and the one after its last."""


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Where its elements lie; None without any."""
    if tensor.numel() == 0:
        return None
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        length = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((n - 1) * stride for n, stride in steps)
    end = begin + length * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, end


def overlap(one: Extent, other: Extent) -> bool:
    """Whether they share memory."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
