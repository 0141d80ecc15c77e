"""A planted exception interrupts a pass, and the trainer catches it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NoReturn

from torch import nn


class PlantedError(Exception):
    """What an interrupted pass or closure raises."""


def fail(*_: object) -> NoReturn:
    """Raise it: a hook."""
    raise PlantedError


@contextlib.contextmanager
def failing(part: nn.Module, *, prepend: bool = False) -> Iterator[None]:
    """The forward of `part` raises, with `prepend` before its hooks; the trainer catches that."""

    handle = part.register_forward_pre_hook(fail, prepend=prepend)
    with contextlib.suppress(PlantedError):
        yield
    handle.remove()
    # Before PyTorch 2.13, checkpointing whose function raises goes on packing what autograd saves
    # until it is collected; a thread of a GPU's backward that collects it aborts the process.
    gc.collect()
