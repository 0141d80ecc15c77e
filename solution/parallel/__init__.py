"""Data-parallel training: one file per method; they do not import each other.

A training loop needs only the two functions below. They accept the module that a wrapper returned,
or a plain one, for which they do nothing; so one loop serves all methods.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn


def no_sync(wrapped: nn.Module) -> AbstractContextManager[None]:
    """Return a context for forward *and* backward of a micro-batch whose gradients stay local.

    Inside, `.grad` holds local sums and nothing is sent. It nests, and restores the previous state
    also when the body raises. For a module without `no_sync` it does nothing.
    """
    context: AbstractContextManager[None] = getattr(wrapped, "no_sync", nullcontext)()
    return context


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Make `.grad` the mean over the group; call it once after every backward outside `no_sync`.

    A second call changes nothing. For a module that has nothing to finish it does nothing.
    """
    finish = getattr(wrapped, "finish_gradient_synchronization", None)
    if finish is not None:
        finish()
