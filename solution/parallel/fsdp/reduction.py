"""A reduction: gradients of one message on their way to become means, in one stage or in two.

On a 1-D mesh a reduce-scatter gives each rank the sum of its rows. On a 2-D mesh replicas add up
those sums in a second stage, which may be left to a later micro-batch.

PyTorch counterpart: `foreach_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solution import comm
from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.message import Buffers, Message, outside_of_autograd
from solution.parallel.fsdp.param import ShardedParameter


@dataclass(frozen=True)
class Reduction:
    """Gradients on their way to become means; in the network until `finish`.

    Attributes:
        buffers: that take the message's memory back.
        own: `[m]`, the sum of this rank's row when `handle` is done.
        partials: for each parameter, rows of earlier sums that wait for replicas, if any.
        is_partial: replicas are averaged another time.
    """

    grid: Grid
    buffers: Buffers
    message: Message
    own: torch.Tensor
    partials: Sequence[torch.Tensor | None]
    handle: comm.Handle
    divisors: Divisors
    is_partial: bool

    def finish(self) -> None:
        """Wait for the means and add them to the gradients of the shards."""
        divisors = self.divisors
        with outside_of_autograd():
            self.handle.wait()
            mean = self.own / divisors.between  # in memory of its own: the message is used again
            self.buffers.give(self.message)
            if any(partial is not None for partial in self.partials):
                for partial, rows in zip(self.partials, self._rows(mean), strict=True):
                    if partial is not None:
                        rows += partial
            if not self.is_partial:
                mean = self.grid.sum_over_replicas(mean)
                if divisors.after != 1:
                    mean.div_(divisors.after)
                mean = mean.to(self.message.parameters[0].local.dtype)
            parameters, kind = self.message.parameters, ShardedParameter
            keep = kind.hold_partial if self.is_partial else kind.add_gradient
            is_cleared = [parameter.lift_token() for parameter in parameters]
            for parameter, rows, cleared in zip(
                parameters, self._rows(mean), is_cleared, strict=True
            ):
                if not cleared:
                    keep(parameter, rows)

    def let_be_cleared(self) -> None:
        """From here on, and until it is finished, clearing the gradients clears these as well."""
        for parameter in self.message.parameters:
            parameter.leave_token()

    def _rows(self, row: torch.Tensor) -> list[torch.Tensor]:
        return self.message.layout.pieces(row, self.grid.rank)

    def drop(self) -> None:
        """Wait, and forget what came."""
        self.handle.wait()
        self.buffers.give(self.message)


@dataclass(frozen=True)
class Divisors:
    """How a sum becomes a mean: by what it is divided before, between and after its two stages.

    PyTorch's FSDP divides after each stage, and so has these bits. In float16 a sum of W gradients
    would overflow where the mean does not: there the power of two that is at least W goes first,
    which changes no bit of what neither overflows nor underflows.
    """

    before: float
    between: float
    after: float

    @classmethod
    def of(cls, dtype: torch.dtype, grid: Grid, factor: float | None) -> Divisors:
        """For gradients that are reduced in `dtype`, and divided by `factor` if there is one."""
        first, second = grid.stages
        if dtype is torch.float16:
            power = 2.0 ** (first * second - 1).bit_length()
            return cls(power, 1.0, (factor or first * second) / power)
        return cls(1.0, first, second) if factor is None else cls(1.0, 1.0, factor)
