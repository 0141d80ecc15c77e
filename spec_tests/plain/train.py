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
    records = PlainTrain(
        model, optimizer, batches, steps=2, global_batch_size=8, micro_batch_size=2,
        max_norm=1.0, lr=None,
    ).run()

Cost: one reduction of the gradients and two of a number per step.

Source: Goyal et al. 2017 on large batches; transformers issue 34242 on the mean of means. Comes
with the plain data-parallel wrapper.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spec_tests.plain.ddp import PlainDdp

Batch = tuple[torch.Tensor, torch.Tensor]


class PlainTrain:
    """Counts the targets of a step first, so that every loss can be scaled as it is formed."""

    def __init__(self, model: nn.Module, optimizer: Any, batches: Any, **options: Any) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, iter(batches)
        self.steps: int = options["steps"]
        self.max_norm: float | None = options["max_norm"]
        self.lr: Any = options["lr"]
        self.size = dist.get_world_size() if self.is_wrapped() else 1
        self.accumulate = self.accumulation_steps(
            options["global_batch_size"], options["micro_batch_size"], self.size
        )

    @staticmethod
    def accumulation_steps(whole: int, micro: int, size: int) -> int:
        if whole % (micro * size):
            raise ValueError(f"{whole} does not divide by {micro} * {size}")
        return whole // (micro * size)

    def is_wrapped(self) -> bool:
        return hasattr(self.model, "no_sync")

    def run(self) -> list[dict[str, float]]:
        return [self.step(number) for number in range(self.steps)]

    def step(self, number: int) -> dict[str, float]:
        micros = self.fetch()
        tokens = self.total(float(sum(self.count(batch) for batch in micros)))
        self.clear()
        loss = 0.0
        for index, batch in enumerate(micros):
            loss += self.micro_batch(index, batch, tokens)
        self.finish()
        norm = self.clip()
        self.set_rate(number)
        rate = self.rate()
        self.optimizer.step()
        return self.record(loss=self.report(loss, tokens), lr=rate, grad_norm=norm, tokens=tokens)

    def record(self, **fields: float) -> dict[str, float]:
        return fields

    # ------------------------------------------------------------------------------- one step

    def fetch(self) -> list[Batch]:
        return [next(self.batches) for _ in range(self.accumulate)]

    def count(self, batch: Batch) -> int:
        return int((batch[1] != -100).sum())

    def total(self, number: float) -> float:
        """The sum over the ranks."""
        if not self.is_wrapped():
            return number
        box = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(box)
        return float(box)

    def clear(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()  # also what the optimizer does not hold

    def window(self, index: int) -> AbstractContextManager[Any]:
        is_last = index == self.accumulate - 1
        if is_last or not self.is_wrapped():
            return contextlib.nullcontext()
        found: AbstractContextManager[Any] = self.model.no_sync()  # type: ignore[operator]
        return found

    def micro_batch(self, index: int, batch: Batch, tokens: float) -> float:
        """Forward and backward; returns the sum of the losses."""
        with self.window(index):
            loss = self.losses(batch)
            self.backward(loss * self.scale(batch, tokens))
        return float(loss.detach())

    def losses(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch[0]).float().flatten(0, 1)
        return F.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")

    def scale(self, batch: Batch, tokens: float) -> float:
        return self.size / tokens

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def finish(self) -> None:
        for name in ("finish_gradient_synchronization", "finish"):
            if hasattr(self.model, name):
                getattr(self.model, name)()
                return

    def clip(self) -> float:
        """The norm; clips if asked to."""
        limit = float("inf") if self.max_norm is None else self.max_norm
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if norm != norm:  # the same on all ranks: gradients are
            raise RuntimeError("the gradient is NaN")
        return norm

    def set_rate(self, number: int) -> None:
        if self.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr(number)

    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def report(self, loss: float, tokens: float) -> float:
        return self.total(loss) / tokens

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's functions for this class of loops, and the plain wrapper's."""

        def train(
            model, optimizer, batches, *, steps, global_batch_size, micro_batch_size,
            max_norm=None, lr=None,
        ):  # fmt: skip
            return cls(
                model,
                optimizer,
                batches,
                steps=steps,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                max_norm=max_norm,
                lr=lr,
            ).run()

        def accumulation_steps(*, global_batch_size, micro_batch_size, world_size):
            return cls.accumulation_steps(global_batch_size, micro_batch_size, world_size)

        found = {"train": train, "accumulation_steps": accumulation_steps}
        return found | cls.wrapper_functions()

    @classmethod
    def wrapper_functions(cls) -> dict[str, Any]:
        """Return the contract's functions that wrap the model and end a backward."""
        return PlainDdp.functions()
