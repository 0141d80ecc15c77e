"""The contract of a training run: its data, its loop, its checkpoints."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Path = str | PathLike[str]


def token_loader(
    paths: Sequence[Path],
    *,
    batch_size: int,
    sequence_length: int,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of next-token pairs over kjj0 `.bin` shards.

    A shard is 256 little-endian int32 header words (20240520, 1, count) and `count` uint16 tokens,
    or none; the file ends there. Files are only read, in the caller's order. Sequence k of a shard
    is tokens `[kT, (k+1)T]` (T inputs, targets shifted by one); sequences never cross a shard;
    shards index one after another. Batch i of rank r is global sequences
    `[iWB + rB, iWB + rB + B)`; what does not fill W*B is dropped. One pass per `iter`, then it
    ends; the next `iter` starts anew, also where the one before was not finished.

    Yields int64 `[batch_size, sequence_length]` inputs and targets that own their memory.
    `state_dict` and `load_state_dict` may be absent: then they are not judged.
    `state_dict()` is a snapshot of the number of batches *yielded*, counted from the start of the
    data, at the end of a pass all of them; after `load_state_dict`, until the next `iter`, the
    state that was loaded; the next `iter` goes on there,
    also at another world size with the same W*B. Where rank and world size are not given, RANK and
    WORLD_SIZE say them; where neither is set there is one rank. ValueError at construction: sizes
    that are not positive, a rank outside of the world, one of the two variables without the other,
    no files, and files that are not as above (OSError, too, for one that is not there). Data
    without a single batch may be refused in the same way. Level `production`: a state that lies
    between two batches of another W*B is refused, and memory grows with batches, not with shards.
    """


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches per rank and optimizer step, an int.

    `global_batch_size` over `micro_batch_size * world_size`; ValueError when it does not divide.
    """


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_norm: float | None = None,
    lr: Callable[[int], float] | None = None,
) -> Sequence[Any]:
    """The loop of the training chapter, for plain and wrapped models.

    `model(ids)` gives logits; the loss is their cross-entropy with the targets, of which those of
    -100 do not count. Loss and gradient are means over all valid tokens of the step on all ranks.
    One record per optimizer step, on every rank, by key or attribute: `loss`; `lr`, which its
    update used; `grad_norm` of that step's gradient (before clipping: level `production`);
    `tokens`, the valid ones of the step on all ranks. With `max_norm` the gradient of a step is
    clipped once, as by `clip_grad_norm_`. The update after k finished ones of this call uses
    `lr(k)` in every group of parameters; without `lr` each group's own.

    Exactly the micro-batches of `steps` steps are taken; ids and targets may be slices. Gradients
    from before the call do not count. The process group says how many ranks there are. A global
    batch that does not divide is a ValueError before any update. A step for which the data do not
    suffice is left out, or taken with the mean over what it has, or the call raises. What is not
    finite is dealt with alike on all ranks: they go on, skip the update, or raise. Level
    `production`: a model in PyTorch's DistributedDataParallel is trained alike, one that
    `fully_shard` sharded, and one in a wrapper with a process group of its own, by its ranks;
    batches are only read; a `max_norm` of 0 leaves the weights, or is refused; a StopIteration of
    `lr` is an error of the call.
    """


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any = None,
) -> Any:
    """Write a complete checkpoint of `step` below `directory`, or nothing. All ranks call it.

    Complete is everything from which training goes on as if it had not stopped: parameters and
    buffers of the model, plain or in a wrapper (DistributedDataParallel, the implementation's own),
    by the plain model's names; the optimizer's state and options, a sharded one's whole or refused
    with an error; the loader's `state_dict()`; on each rank the state of torch's, NumPy's and
    Python's generators. Where replicas' buffers differ, the first rank's count. `step` counts
    finished optimizer steps, from 0. Saving and training have no effect on each other.

    When the call returns, the checkpoint is there. A failure on any rank is an error on all. A
    failure, like a kill at any moment, leaves what was saved before and is not in the way of the
    next save. Saving a step again replaces it, at once or not at all. Level `production`: a model
    that `fully_shard` or `fsdp` sharded, and the optimizer of its shards, too, or they are refused;
    the optimizer's state in the dtypes that it has; each rank's state of its loader, also of one of
    length 0; and a buffer that is a part of another one.
    """


def load_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: Optimizer, loader: Any = None
) -> int:
    """Load the newest complete checkpoint below `directory`; returns its step. All ranks call it.

    Newest is the highest step; other people's files and folders there do not count. Values replace
    those of the parameters and optimizer that are given, at any world size; generators at that of
    the save. They share no memory with anything else. Incomplete or damaged saves are passed over,
    or are an error, as a model that does not fit is on all ranks (a flipped bit: advice). Without
    any save: an error, or 0 and nothing changed.
    """
