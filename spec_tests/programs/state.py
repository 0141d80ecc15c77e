"""What a program leaves: the state that decides which calls are legal next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """What a trainer knows between two calls.

    Attributes:
        shares: micro-batches in the gradients; the arithmetic of a toy is exact for so many.
        is_open: gradients of single ranks wait for their reduction.
        is_begun: a reduced backward is not finished yet.
        waits: a loss exists whose backward is still to come.
        is_left: another backward raised while it waited.
        is_broken: a backward was interrupted, and nothing was cleared since.
        is_reduced: gradients were reduced since they were cleared.
        is_saved: there has been a save.
        is_zeroed: gradients were cleared to zero, and not to None, since the last step.
        frozen: numbers of the parameters that are frozen now.
        has_grown: the optimizer was given a further group.
        is_unsharded: the parameters are full ones, by hand: the model's `zero_grad` sees no shard.
        may_refuse: a call was made that may be refused, or an exception was caught: from then on an
            error is right as well.
    """

    shares: int = 0
    is_open: bool = False
    is_begun: bool = False
    waits: bool = False
    is_left: bool = False
    is_broken: bool = False
    is_reduced: bool = False
    is_saved: bool = False
    is_zeroed: bool = False
    frozen: frozenset[int] = frozenset()
    has_grown: bool = False
    is_unsharded: bool = False
    may_refuse: bool = False
