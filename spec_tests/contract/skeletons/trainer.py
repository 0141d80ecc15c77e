"""A training step: accumulate, reduce, clip, update, record.

The loop is short and its arithmetic is easily wrong: a loss is a mean over tokens, and neither
micro-batches nor ranks need have equally many. Done right, it computes the same update for any
way of cutting the global batch.

Do one task after the other; the clauses of a task say when it is done:

    1. How many micro-batches a step takes.
        python -m spec_tests --impl THIS_FILE --clause 'training.accumulation.*'
    2. The gradient: a mean over all valid tokens of the step, on all ranks.
        python -m spec_tests --impl THIS_FILE --clause 'training.gradient.*'
    3. Take the data that you use, clip, follow the rate, and say what was done.
        python -m spec_tests --impl THIS_FILE --clause 'training.data.*' --clause 'training.clip.*'
        python -m spec_tests --impl THIS_FILE --clause 'training.rate.*'
        python -m spec_tests --impl THIS_FILE --clause 'training.records.*'
    4. One reduction per step; ranks decide together about a loss that is not finite.
        python -m spec_tests --impl THIS_FILE --level production --clause 'training.traffic.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'training.finite.*'

All of it: `make check IMPL=THIS_FILE`; what a course asks: `ARGS="--level course"` besides.
Names and arguments are those of spec_tests/contract/training.py. Clauses that wrap the model need a
`ddp` in the same file as well: import your own, with `no_sync` and
`finish_gradient_synchronization`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class ToDo(Exception):
    """This step is still to be done."""


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches per rank and optimizer step.

    Task 1: `micro_batch_size * world_size` sequences are done at a time; a ValueError with the
      three numbers in it if that does not divide the global batch.
    """
    raise ToDo("task 1: how many micro-batches of all ranks fill the global batch")


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
    """One record per optimizer step: `loss`, `lr`, `grad_norm`, `tokens`.

    Task 2, for each of `steps` steps:
      a. Drop old gradients. Take this rank's micro-batches of the step from `batches`.
      b. Count valid targets (not -100) over micro-batches *and ranks*: one small all-reduce.
      c. For each micro-batch: sum of token losses, divided by that count, times the number of ranks
         where a wrapper will take the mean over ranks. All but the last inside of `no_sync`.
      d. `finish_gradient_synchronization`, if the model is wrapped and there is one.
    Task 3:
      a. Take exactly the micro-batches of `steps` steps, and never a part of a step in silence.
      b. Clip the averaged gradients to `max_norm`; the record's norm is the one before clipping.
      c. The update after k finished ones uses `lr(k)`, and the record says so.
      d. The record's loss is the mean over all valid tokens of the step on all ranks.
    Task 4: if a loss or norm is not finite anywhere, all ranks raise, before the update.
    """
    raise ToDo("task 2: one step's gradient, a mean over all valid tokens of all ranks")
