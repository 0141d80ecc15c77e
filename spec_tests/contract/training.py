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
    """Read batches of next-token pairs from kjj0 `.bin` shards.

    A shard is 256 little-endian int32 header words (20240520, 1, count) and `count` uint16 tokens,
    zero or more; the file ends there. Sequence k of a shard has the tokens `[kT, (k+1)T]`, with
    T = `sequence_length`. Below, B = `batch_size` and W = `world_size`.

    Args:
        paths: the shards.
        rank, world_size: this rank and the number of ranks. Where neither is given, RANK and
            WORLD_SIZE say them. A call that gives one of the two is not judged.

    Returns:
        An iterable of (inputs, targets) with `state_dict()` and `load_state_dict(state)`. These two
        may be absent: then they are not judged. Not judged either: the state while two passes are
        open, the state between an `iter` and its first batch, and a pass that was open at a load
        and goes on.

    Raises:
        ValueError, OSError: at construction, see `bad-arguments` to `absent-files`.

    Level `course`:
        int64: Inputs and targets are int64 tensors of shape `[batch_size, sequence_length]`.
        shifted: Targets are the inputs shifted by one token.
        in-order: Sequences are numbered through a shard, and through one shard after another.
        ranks-differ: No token is an input twice in a pass, on one rank or on two.

    Level `correct`:
        own-memory: Inputs and targets own their memory.
        read-only: Files are only read.
        callers-order: Shards are read in the caller's order, one that is listed twice twice.
        within-shard: A sequence never crosses the end of a shard.
        global-order: Batch i of rank r is the global sequences `[iWB + rB, iWB + rB + B)`.
        whole-batches: Sequences that do not fill W*B are dropped.
        one-pass: Each `iter` gives one pass, which ends.
        starts-anew: The next `iter` starts at the first batch of the data, whatever came before.
        environment: Where rank and world size are not given, RANK and WORLD_SIZE say them.
        one-rank: Where neither RANK nor WORLD_SIZE is set there is one rank.
        state-counts: The state counts batches *yielded*, from the start of the data.
        state-at-end: At the end of a pass the state counts all batches of the pass.
        state-snapshot: A state is a snapshot.
        state-loaded: From `load_state_dict` to the next `iter` the state is the loaded one.
        resumes: The `iter` after `load_state_dict` goes on from the loaded state.
        any-world-size: A state goes on at any world size with the same W*B.
        bad-arguments: Sizes that are not positive and ranks outside the world are a ValueError.
        half-environment: RANK without WORLD_SIZE, or the reverse, is a ValueError.
        no-files: No files are a ValueError.
        bad-files: A file that is not as described above is a ValueError.
        absent-files: A file that is not there is a ValueError or an OSError.

    Level `production`:
        off-grid: A state that lies between two batches of another W*B is refused.
        memory: Memory grows with the batches, not with the shards.
        descriptors: Further passes leave no further file descriptors open.
        names-file: The error for a bad or absent file contains the name of the file.

    May be refused:
        callers-order: A file that is listed twice, at construction.
        no-batch: Data without a single batch, at construction.
    """


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches per rank and optimizer step.

    Level `course`:
        fills: It is the int `global_batch_size / (micro_batch_size * world_size)`.

    Level `correct`:
        remainder: Sizes that do not divide are a ValueError.
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
    """Train a plain or wrapped model for some optimizer steps.

    The loss is the cross-entropy of `model(ids)` with the targets; targets of -100 do not count. A
    target that counts is "valid". Not judged are

    - a step without a valid target, and the rate after a step that was left out,
    - whether a parameter that the loss does not use has no gradient or zeros,
    - which gradients `max_norm` concerns where the optimizer has only some of the parameters.

    Args:
        batches: micro-batches (ids, targets) of this rank.
        max_norm: the gradient is clipped to it, as by `clip_grad_norm_`; None clips nothing.
        lr: the rate by the number of finished updates; None leaves each group its own.

    Returns:
        One record per optimizer step, with `loss`, `lr`, `grad_norm`, `tokens` by key or attribute.

    Raises:
        ValueError: before any update, if the global batch does not divide.

    Level `course`:
        plain: A plain model is trained as on whole batches.
        one-process: Loss and gradient are means over all valid tokens of the step on all ranks.

    Level `correct`:
        takes: Exactly the micro-batches of `steps` steps are taken.
        slices: Ids and targets may be slices.
        leftovers: Gradients from before the call do not count.
        world: The ranks are those of the wrapper's group; a model in no wrapper trains alone.
        remainder: A global batch that does not divide is a ValueError before any update.
        short-step: A step that lacks data is left out, or uses the mean over the data it has.
        alike: All ranks treat values that are not finite alike: go on, skip the update, or raise.
        clips-once: With `max_norm` the gradient of a step is clipped once.
        records: Every rank gets one record per optimizer step.
        loss: `loss` is the mean over the valid tokens of the step on all ranks.
        tokens: `tokens` is the number of valid tokens of the step on all ranks.
        grad-norm: `grad_norm` is the norm of the step's gradient.
        reported-lr: `lr` of a record is the rate that its update used, in one of the groups.
        schedule: The update after k finished ones of this call uses `lr(k)` in every group.
        own-rates: Without `lr` each group of parameters keeps its own rate.

    Level `production`:
        norm-before: `grad_norm` is the norm before clipping.
        finite: A step whose loss is not finite never reaches the weights.
        ddp-model: A model in PyTorch's DistributedDataParallel is trained alike.
        sharded-model: A model that `fully_shard` sharded is trained alike.
        group-model: A wrapper's own process group says which ranks train its model.
        batches-stay: Batches are only read.
        max-norm-zero: A `max_norm` of 0 leaves the weights.
        lr-ends: A StopIteration of `lr` is an error of the call.
        one-reduction: Gradients are reduced once per optimizer step, not per micro-batch.

    May be refused:
        short-step: A step that lacks data.
        alike: A value that is not finite, on all ranks.
        max-norm-zero: A `max_norm` of 0.
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

    A checkpoint is complete if training goes on from it as if it had not stopped.

    Args:
        step: the number of finished optimizer steps, from 0.
        model: plain or in a wrapper (DistributedDataParallel, or the implementation's own).
        optimizer: plain, or sharded by `sharded_optimizer`.
        loader: anything with `state_dict()` and `load_state_dict(state)`.

    Level `correct`:
        model: Every entry of the model's `state_dict` is saved, also from inside a wrapper.
        plain-names: Entries are saved by the plain model's names.
        optimizer: The optimizer's state and options are saved.
        sharded-optimizer: The state of a sharded optimizer is saved whole.
        loader: The loader's `state_dict()` is saved.
        generators: On each rank the states of torch's, NumPy's and Python's generators are saved.
        first-buffers: Where replicas' buffers differ, the first rank's are saved.
        independent: Saving and training have no effect on each other.
        on-return: When the call returns, the checkpoint is there.
        all-fail: A failure on any rank is an error on all.
        keeps-older: A failure, or a kill at any moment, leaves earlier checkpoints as they are.
        next-save: A failure, or a kill at any moment, is not in the way of the next save.
        replaces: Saving a step again is no error, and replaces it at once or not at all.

    Level `production`:
        sharded-model: A model that `fully_shard` sharded is saved, and the optimizer of its shards.
        whole-model: A model that `fsdp` sharded is saved, and the optimizer of its shards.
        state-dtypes: The optimizer's state is saved and loaded in the dtypes that it has.
        each-loader: Each rank's state of its loader is saved, also of a loader of length 0.
        part-buffers: A buffer that is a part of another one is saved.

    May be refused:
        sharded-optimizer: A sharded optimizer.
        sharded-model: A model that `fully_shard` sharded.
        whole-model: A model that `fsdp` sharded.
    """


def load_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: Optimizer, loader: Any = None
) -> int:
    """Load the newest complete checkpoint below `directory`. All ranks call it.

    At another world size the loaded values are equal to the bit; weights of later steps differ, as
    between uninterrupted runs at these world sizes, by the order in which gradients are summed. An
    optimizer such as Adam makes a step of up to the learning rate out of a gradient's rounding.
    Saves and loads that differ in whether a loader is given are not judged.

    Returns:
        The step of that checkpoint, or 0 where there is none.

    Level `correct`:
        newest: The newest checkpoint is the one of the highest step.
        step: The step that was given to the save is returned on every rank.
        foreign: Files and folders of other people do not count.
        live-objects: Values replace those of the parameters and optimizer that are given.
        any-world-size: A checkpoint loads at any world size.
        generators: Generators are restored at the world size of the save.
        shares-nothing: Loaded values share no memory with anything else.
        damaged: An incomplete or damaged checkpoint is passed over (a flipped bit: advice).
        no-fit: A model that does not fit is an error on all ranks.
        none: Where there is no checkpoint, 0 is returned and nothing changes.

    Level `production`:
        optimizer-names: Optimizer state follows parameter names; order and groups may differ.
        any-place: A checkpoint loads from any working directory, and after its folder was moved.
        failed-load: A load that raises leaves model, optimizer, loader and generators as they are.
        names-tensor: The error for a model that does not fit names a tensor that does not fit.
        runs-no-code: A load runs no code that a file of the checkpoint asks for.

    May be refused:
        damaged: A folder in which a checkpoint is incomplete or damaged.
        none: A folder without a checkpoint.
        optimizer-names: An optimizer whose parameters have another order or other groups.
    """
