"""A data-parallel training loop with gradient accumulation.

Problem: a global batch larger than memory, on any number of ranks, must train like one process that
sees the whole batch; micro-batches may hold different numbers of targets.

Idea: count the targets of the step on all ranks first. Then each loss can be a sum scaled by
ranks / tokens, and the mean over ranks that the wrapper forms is the mean over tokens.

Steps, for each optimizer step
    1. Fetch global_batch_size / (micro_batch_size * ranks) micro-batches; sum their targets.
    2. Clear gradients; forward and backward of each, all but the last within `no_sync`.
    3. Finish the reduction, clip, stop on all ranks if the norm is NaN, set the rate, step.
    4. Report the mean loss, the rate of this step, the norm before clipping, the tokens.

Use
    records = train(
        model, optimizer, batches, steps=2, global_batch_size=8, micro_batch_size=2, max_norm=1.0
    )

Cost: one reduction of the gradients and two of a number per step.

Source: Goyal et al. 2017 on large batches; transformers issue 34242 on the mean of means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def train(
    model: Any,
    optimizer: Any,
    batches: Iterable[Batch],
    *,
    steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_norm: float | None = None,
    lr: Callable[[int], float] | None = None,
) -> list[dict[str, float]]:
    """Train for some steps; a model with `no_sync` is on every rank, any other on this one alone.

    Returns:
        A record for each step.
    """
    is_wrapped = hasattr(model, "no_sync")
    size = dist.get_world_size() if is_wrapped else 1
    accumulate = accumulation_steps(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, world_size=size
    )
    given = iter(batches)
    records = []
    for number in range(steps):
        micros = [next(given) for _ in range(accumulate)]
        tokens = total(float(sum(count(batch) for batch in micros)), is_wrapped)
        optimizer.zero_grad()
        model.zero_grad()  # also what the optimizer does not hold
        loss = 0.0
        for index, batch in enumerate(micros):
            is_last = index == len(micros) - 1
            with contextlib.nullcontext() if is_last or not is_wrapped else model.no_sync():
                own = summed_loss(model, batch)
                (own * (size / tokens)).backward()
            loss += float(own.detach())
        finish(model)
        limit = float("inf") if max_norm is None else max_norm
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        if norm != norm:  # the same on all ranks: gradients are
            raise RuntimeError("the gradient is NaN")
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr(number)
        rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        records.append(
            {
                "loss": total(loss, is_wrapped) / tokens,
                "lr": rate,
                "grad_norm": norm,
                "tokens": tokens,
            }
        )
    return records


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return how many micro-batches of each rank make a global batch."""
    whole, micro, size = global_batch_size, micro_batch_size, world_size
    if whole % (micro * size):
        raise ValueError(f"{whole} does not divide by {micro} * {size}")
    return whole // (micro * size)


def count(batch: Batch) -> int:
    """Return the number of targets that are not masked."""
    return int((batch[1] != -100).sum())


def total(number: float, is_wrapped: bool) -> float:
    """Return the sum over the ranks, if the model is on all of them."""
    if not is_wrapped:
        return number
    box = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def summed_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of all targets."""
    logits = model(batch[0]).float().flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")


def finish(model: Any) -> None:
    """Wait for the reduction, if the wrapper asks for a call; wrappers name it in two ways."""
    for name in ("finish_gradient_synchronization", "finish"):
        if hasattr(model, name):
            getattr(model, name)()
            return


class PlainTrain:
    """What this file offers."""

    @staticmethod
    def functions() -> dict[str, Any]:
        """Return the contract's functions."""
        return {"train": train, "accumulation_steps": accumulation_steps}
