"""A message: parameters of one dtype on their way between ranks, and the memory it lies in.

Filling fresh memory costs about as much as sending it, so buffers are used again within a pass. The
schedule drops them when the pass ends: between steps a model is its shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from solution.parallel.fsdp.layout import Layout, Pairs, layout_of
from solution.parallel.fsdp.param import ShardedParameter


class Buffers:
    """Memory for messages, used again within a pass: filling fresh memory costs as much as sending.

    The schedule drops it when a pass ends, so between steps a model is its shards.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # 1-D, bytes

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """At least `num_bytes` on `device`, out of the smallest buffer that is free."""
        fitting = [b for b in self._free if b.device == device and b.numel() >= num_bytes]
        if not fitting:
            # One that is too small makes room for it: what that could serve, this one can.
            self._free = sorted(self._free, key=torch.Tensor.numel)[:-1]
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        found = min(fitting, key=torch.Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not found]
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Take back what `take` gave, once nothing reads or writes it."""
        self._free.append(buffer)

    def drop(self) -> None:
        """Let go of all that is free."""
        self._free.clear()


@dataclass(frozen=True)
class Message:
    """Parameters of one dtype on their way.

    Attributes:
        matrix: `[W, m]`, inside of `buffer`.
    """

    parameters: list[ShardedParameter]
    layout: Layout
    matrix: torch.Tensor
    buffer: torch.Tensor

    @classmethod
    def of(
        cls,
        parameters: list[ShardedParameter],
        dtype: torch.dtype,
        num_ranks: int,
        buffers: Buffers,
    ) -> Message:
        """A message for these parameters; what it holds is undefined."""
        layout = layout_of(tuple(p.shape for p in parameters), num_ranks)
        numel = num_ranks * layout.width
        buffer = buffers.take(numel * dtype.itemsize, parameters[0].local.device)
        matrix = buffer[: numel * dtype.itemsize].view(dtype).view(num_ranks, layout.width)
        return cls(parameters, layout, matrix, buffer)


def outside_of_autograd() -> AbstractContextManager[None]:
    """Nothing is recorded, and what is made here serves a training step after an evaluation."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _outside_of_autograd()
    return nullcontext()  # entered already: most backwards and all inner calls


@contextmanager
def _outside_of_autograd() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def copy(pairs: Pairs) -> None:
    """Copy the second of each pair into the first, whatever their dtypes."""
    if pairs:
        into, values = zip(*pairs, strict=True)
        torch._foreach_copy_(list(into), list(values))
