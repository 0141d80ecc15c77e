"""The contract of a training run: its data, its loop, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

Path = str | PathLike[str]


class TokenLoader(Protocol):
    """Batches of next-token pairs over kjj0 `.bin` shards.

    A shard is 256 little-endian int32 header words (20240520, 1, count) and `count` uint16 tokens,
    or none; the file ends there. Files are only read, in the caller's order. Sequence k of a shard
    is tokens `[kT, (k+1)T]` (T inputs, targets shifted by one); sequences never cross a shard;
    shards index one after another. Batch i of rank r is global sequences `[iWB + rB, iWB + rB + B)`;
    what does not fill W*B is dropped. One pass per `iter`, then it ends; the next `iter` starts
    anew, also where the one before was not finished.

    Yields int64 `[batch_size, sequence_length]` inputs and targets that own their memory.
    `state_dict()` is a snapshot of the number of batches *yielded*, counted from the start of the
    data, at the end of a pass all of them; after `load_state_dict` the next `iter` goes on there,
    also at another world size with the same W*B. Where rank and world size are not given, RANK and
    WORLD_SIZE say them; where neither is set there is one rank. ValueError at construction: sizes
    that are not positive, a rank outside of the world, one of the two variables without the other,
    no files, and files that are not as above (OSError, too, for one that is not there). Data
    without a single batch may be refused in the same way.
    """

    def __call__(
        self,
        paths: Sequence[Path],
        *,
        batch_size: int,
        sequence_length: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]: ...


class AccumulationSteps(Protocol):
    """Micro-batches per rank and optimizer step; ValueError when it does not divide."""

    def __call__(
        self, *, global_batch_size: int, micro_batch_size: int, world_size: int
    ) -> int: ...


class Train(Protocol):
    """The loop of the training chapter, for plain and wrapped models.

    One record per optimizer step: `loss`, `lr`, `grad_norm`, `tokens`. Targets of -100 do not
    count; loss and gradient are means over all valid tokens of the step on all ranks. The update
    after k finished ones uses `lr(k)`. Exactly the micro-batches of `steps` steps are taken.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
        *,
        steps: int,
        global_batch_size: int,
        micro_batch_size: int,
        max_norm: float | None = None,
        lr: Callable[[int], float] | None = None,
    ) -> Sequence[Any]: ...


class SaveCheckpoint(Protocol):
    """Write a complete checkpoint of `step` below `directory`, or nothing. All ranks call it.

    Complete is everything from which training goes on as if it had not stopped: parameters, buffers
    and optimizer state of the model, plain or wrapped, by the plain model's names; the loader's
    `state_dict()`; on each rank the state of torch's, NumPy's and Python's generators. Where
    replicas' buffers differ, the first rank's count. `step` counts finished optimizer steps. Saving
    and training have no effect on each other. A failure on any rank is an error on all, and leaves
    what was saved before. Saving a step again replaces it.
    """

    def __call__(
        self,
        directory: Path,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any = None,
    ) -> Any: ...


class LoadCheckpoint(Protocol):
    """Load the newest complete checkpoint below `directory`; returns its step. All ranks call it.

    Newest is the highest step. Values go into the parameters and optimizer that are given, at any
    world size; generators at that of the save. Incomplete or damaged saves are passed over, or are
    an error, as a model that does not fit is. Without any save: an error, or 0 and nothing changed.
    """

    def __call__(
        self, directory: Path, *, model: nn.Module, optimizer: Optimizer, loader: Any = None
    ) -> int: ...
