"""How training is spread over ranks: one file per method, strangers to each other.

The two functions below are what a training loop needs to know of any of them. They take the module
that a wrapper returned, or a plain one, for which there is nothing to postpone and nothing to
finish; so a loop is written once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


def no_sync(wrapped: nn.Module) -> AbstractContextManager[None]:
    """A context for forward *and* backward of a micro-batch whose gradients stay on this rank.

    Inside, `.grad` holds plain local sums and nothing is sent. It nests, and restores the previous
    state also when the body raises. For a module without `no_sync` it does nothing.
    """
    postpone = getattr(wrapped, "no_sync", None)
    if postpone is None:
        return nullcontext()
    context: AbstractContextManager[None] = postpone()
    return context


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Called once after every backward outside `no_sync`: makes `.grad` the mean over the group.

    A second call changes nothing. For a module that has nothing to finish it does nothing.
    """
    finish = getattr(wrapped, "finish_gradient_synchronization", None)
    if finish is not None:
        finish()
