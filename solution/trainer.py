"""The training loop: `train` runs optimizer steps, `training_steps` hands them out one by one.

    global batch of a step = micro-batch x accumulation steps x ranks

What a step does, and which protocols it asks of a wrapped model, stands in `solution.step`. The
loop adds what is decided once: that the batch sizes divide, who takes part, where the data comes
from, in which number format the forward runs. It fetches exactly what it uses, so that a loader's
state after n steps is n steps of data.

    for record in training_steps(model, optimizer, loader, steps=20, ...):
        print(record["step"], record["loss"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from solution.config import divisors, require_positive
from solution.precision import Precision
from solution.step import Batch, DataExhaustedError, NonFiniteError, Ranks, Step, StepRecord

__all__ = [
    "DataExhaustedError",
    "NonFiniteError",
    "StepRecord",
    "accumulation_steps",
    "train",
    "training_steps",
]


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """How many micro-batches each rank runs per optimizer step.

    Raises:
        ValueError: a size is not a positive integer, or micro_batch_size * world_size does not
            divide global_batch_size: rounding would train with another batch than asked for.

    >>> accumulation_steps(global_batch_size=32, micro_batch_size=8, world_size=2)
    2
    """
    require_positive("global_batch_size", global_batch_size)
    require_positive("micro_batch_size", micro_batch_size)
    require_positive("world_size", world_size)
    per_pass = micro_batch_size * world_size
    if global_batch_size % per_pass:
        advice = f"choose a global_batch_size that is a multiple of {per_pass}"
        if global_batch_size % world_size == 0:
            advice += f", or micro_batch_size from {divisors(global_batch_size // world_size)}"
        raise ValueError(
            f"expected global_batch_size divisible by micro_batch_size * world_size, got "
            f"{global_batch_size} and {micro_batch_size} * {world_size}; {advice}"
        )
    return global_batch_size // per_pass


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_norm: float | None = None,
    lr: Callable[[int], float] | None = None,
    precision: str | Precision = "fp32",
) -> list[StepRecord]:
    """Train for `steps` optimizer steps.

    Args:
        model: ids `[micro_batch_size, ...]` -> logits `[micro_batch_size, ..., classes]`; plain, or
            wrapped by something that has `no_sync` or `finish_gradient_synchronization`.
        optimizer: over the model's parameters.
        batches: `(inputs, targets)` of this rank, one micro-batch each; targets of -100 do not
            count. Exactly steps * accumulation_steps of them are taken.
        steps: optimizer steps.
        global_batch_size, micro_batch_size: sequences per optimizer step, all ranks together; and
            per batch of one rank.
        max_norm: clip the global gradient norm to this; None leaves gradients as they are.
        lr: learning rate as a function of the number of finished steps, for every parameter group;
            None leaves the groups' own.
        precision: "fp32", "bf16" or "fp16": the format of the forward; a `Precision` keeps its loss
            scale for the next call.

    Returns:
        One record (a dict) per optimizer step. Gradients are None afterwards.

    Raises:
        ValueError: sizes that do not divide, a batch of another size, a step with no target.
        DataExhaustedError: `batches` ended early, on any rank; all ranks stop at the same step.
        NonFiniteError: on all ranks at the same step, before the update.
    """
    loop = training_steps(
        model,
        optimizer,
        batches,
        steps=steps,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        max_norm=max_norm,
        lr=lr,
        precision=precision,
    )
    records: list[StepRecord] = []
    try:
        records.extend(loop)
    except DataExhaustedError as error:
        error.records = records
        raise
    return records


def training_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_norm: float | None = None,
    lr: Callable[[int], float] | None = None,
    precision: str | Precision = "fp32",
    first_step: int = 0,
) -> Iterator[StepRecord]:
    """`train`, one step per `next`: for callers that log, measure or save in between.

    Args:
        first_step: how many steps a resumed run has already finished. The rest is as in `train`.
    """
    if steps < 0 or first_step < 0:
        raise ValueError(f"expected steps and first_step >= 0, got {steps} and {first_step}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"expected max_norm > 0 or None, got {max_norm}")
    ranks = Ranks.of(model)
    num_micro_batches = accumulation_steps(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=ranks.size,
    )
    step = Step(
        model=model,
        optimizer=optimizer,
        batches=iter(batches),
        ranks=ranks,
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        max_norm=max_norm,
        lr=lr,
        precision=Precision.of(precision),
    )
    # Not a generator function: its checks would wait for the first `next`.
    return (step.run(finished) for finished in range(first_step, first_step + steps))
