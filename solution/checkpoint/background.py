"""Saving while training goes on, in a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import nn

from solution import comm
from solution.checkpoint.save import Captured, Stateful, checked


class AsyncCheckpointer:
    """Saves while training goes on: `save` blocks for a copy to host memory only.

    At most one save is under way; the next `save`, `wait` and the end of the `with` block wait for
    it and raise what went wrong in it. It has a gloo group of its own: messages of the
    default group and of a thread beside it would meet each other in any order.

        with AsyncCheckpointer("runs/checkpoints", keep=3) as checkpoints:
            ...
            checkpoints.save(step=step, model=model, optimizer=optimizer)

    Made by all ranks. Nothing else may save into the directory meanwhile.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        process_group: comm.Group = None,
    ) -> None:
        self._root = checked(directory, keep)
        self._keep = keep
        self._group = process_group
        self._own_group = comm.own_cpu_group(process_group)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[object] | None = None

    def save(
        self,
        *,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Begin to save; what training does from now on is not in it. Args: `save_checkpoint`.

        Raises:
            CheckpointError: capturing failed, or the save before this one did.
        """
        self.wait()
        captured = Captured.of(step, model, optimizer, loader, extra, self._group, copy=True)
        self._under_way = self._writer.submit(
            captured.write, self._root, self._keep, self._own_group
        )

    def wait(self) -> None:
        """Return when nothing is under way; raises CheckpointError if it went wrong."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait, and leave the group."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            comm.leave(self._own_group)
            self._own_group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
