"""One optimizer step: fetch, backward, reduce, check, update; for plain and for wrapped models.

On every rank:
1. fetch     take this step's micro-batches and agree with the other ranks on how many targets count
2. backward  for each micro-batch: forward and backward of the *sum* of its losses, times W / count;
             all but the last inside `no_sync`, so that gradients travel once
3. reduce    `finish_gradient_synchronization`: .grad is now the mean over the W ranks
4. check     loss and gradient norm finite on all ranks, or all raise and nothing was updated; in
             fp16 all halve the loss scale first, and go back to 2 (`solution.precision`)
5. update    clip once, set the learning rate, optimizer step, drop the gradients

Why W / count: the mean over ranks of (W / count * local sum) is (sum over ranks) / count, the mean
over all targets that count, wherever they lie. Means of means are something else as soon as one
sequence is padded (transformers issue 34242), and a rank whose targets are all -100 would divide by
zero.

The wrapper is known by what it can do, not by its class: `no_sync()`, a context manager around
forward *and* backward (PyTorch's DistributedDataParallel decides in the forward whether to reduce),
and `finish_gradient_synchronization()`; `process_group` says who takes part, None being everyone. A
model with neither method is trained by this rank alone, whatever process groups exist.

Sent per step beside the gradients: three float64 before the backward and two after it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import nn

from solution import comm
from solution.parallel import clip
from solution.precision import Precision

__all__ = ["DataExhaustedError", "NonFiniteError", "Ranks", "Step", "StepRecord"]

IGNORED_TARGET = -100
Batch = tuple[torch.Tensor, torch.Tensor]


class StepRecord(TypedDict):
    """What one optimizer step did; equal on all ranks."""

    step: int  # finished steps, this one included
    loss: float  # mean over the targets that count, of all micro-batches and ranks
    lr: float  # the one this step used
    grad_norm: float  # of the mean gradient, before clipping
    tokens: int  # targets that counted, of all micro-batches and ranks
    skipped: NotRequired[int]  # fp16: updates that overflowed and were dropped before this one
    scale: NotRequired[float]  # fp16: the loss scale that this one used


class DataExhaustedError(RuntimeError):
    """The data ended before the steps did; no partial step was taken.

    Attributes:
        records: of the steps that were finished, where `train` raised it.
    """

    records: list[StepRecord]


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is NaN or infinite on some rank; nothing was updated."""


@dataclass(frozen=True)
class Ranks:
    """The ranks whose gradients a model averages."""

    group: comm.Group
    size: int
    rank: int

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Those of the wrapper's group; this one alone if nothing wraps the model."""
        if not (hasattr(model, "no_sync") or hasattr(model, "finish_gradient_synchronization")):
            return cls(None, 1, 0)
        group = getattr(model, "process_group", None)
        return cls(group, comm.size(group), comm.rank(group))

    def sum(self, *numbers: float | torch.Tensor, device: torch.device) -> list[float]:
        """Each number summed over the ranks, in float64 (exact for counts below 2^53)."""
        if self.size == 1:
            return [float(number) for number in numbers]
        total = torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
        )
        comm.sum_over_ranks(total, self.group)
        return [float(number) for number in total.tolist()]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The steps of one run; `run` is the docstring above, line by line."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    ranks: Ranks
    num_micro_batches: int
    micro_batch_size: int
    max_norm: float | None
    lr: Callable[[int], float] | None
    precision: Precision

    def run(self, finished: int) -> StepRecord:
        """Take step number `finished + 1`; whatever happens, no gradient is left behind."""
        micro_batches, count = self._fetch(finished)
        self._drop_gradients()  # what the caller left behind is not ours to learn from
        try:
            num_skipped = 0
            while (found := self._finite_gradients(finished, micro_batches, count)) is None:
                self._drop_gradients()
                self.precision.back_off()
                num_skipped += 1
            loss, norm = found
            if self.max_norm is not None:
                clip.scale_to_norm_(self.model.parameters(), self.max_norm, norm)
            rate = self._set_learning_rate(finished)
            self.optimizer.step()
        finally:
            self._drop_gradients()
        record = StepRecord(
            step=finished + 1, loss=loss, lr=rate, grad_norm=norm.item(), tokens=count
        )
        if self.precision.name == "fp16":
            record["skipped"], record["scale"] = num_skipped, self.precision.scale
        self.precision.updated()
        return record

    def _finite_gradients(
        self, finished: int, batches: list[Batch], count: int
    ) -> tuple[float, torch.Tensor] | None:
        """Backward, reduce, check: the loss and the norm; None when a smaller scale is worth it."""
        loss_sum = self._backward(batches, scale=self.ranks.size / count)
        self._reduce()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients and self.precision.scale != 1.0:
            torch._foreach_mul_(gradients, 1 / self.precision.scale)
        norm = clip.total_norm(self.model.parameters())
        loss = self._check(finished, loss_sum, count, norm)
        return None if loss is None else (loss, norm)

    # --- 1. fetch

    def _fetch(self, finished: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches, and how many targets count on all ranks."""
        batches, error = self._take()
        count = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in batches)
        is_short = error is None and len(batches) < self.num_micro_batches
        # One sum carries the count and the two reasons to stop, so that no rank stops alone and
        # leaves the others in a collective.
        total, num_short, num_failed = self.ranks.sum(
            count, is_short, error is not None, device=self._device()
        )
        if error is not None:
            raise error
        where = f"rank {self.ranks.rank}, step {finished + 1}"
        if num_failed:
            raise RuntimeError(
                f"{where}: expected every rank to read its data, but {num_failed:.0f} other "
                "rank(s) failed to; see their message"
            )
        if num_short:
            raise DataExhaustedError(
                f"{where}: expected {self.num_micro_batches} micro-batches, got {len(batches)} "
                f"here ({num_short:.0f} of {self.ranks.size} ranks are short); {finished} steps "
                "are finished, the rest was not used. Ask for fewer steps, or give more data"
            )
        if not total:
            raise ValueError(
                f"{where}: expected targets that count, got only {IGNORED_TARGET} on all ranks; "
                "the mean over none is not defined, leave such batches out"
            )
        return batches, int(total)

    def _take(self) -> tuple[list[Batch], Exception | None]:
        """Up to a step of micro-batches, on the model's device; an error is kept, not raised."""
        batches: list[Batch] = []
        device = self._device()
        try:
            while len(batches) < self.num_micro_batches:
                batch = next(self.batches, None)
                if batch is None:
                    break
                inputs, targets = batch
                if len(targets) != self.micro_batch_size:
                    raise ValueError(
                        f"rank {self.ranks.rank}: expected micro-batches of "
                        f"{self.micro_batch_size} sequences, got targets of shape "
                        f"{tuple(targets.shape)}; set micro_batch_size to what the loader yields"
                    )
                batches.append((inputs.to(device), targets.to(device)))
        except Exception as error:
            return batches, error
        return batches, None

    # --- 2. backward, 3. reduce

    def _backward(self, batches: list[Batch], *, scale: float) -> torch.Tensor:
        """Accumulate gradients; returns the unscaled sum of losses, still on the device."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device())
        for index, (inputs, targets) in enumerate(batches):
            is_last = index == len(batches) - 1
            with contextlib.nullcontext() if is_last else self._no_sync():
                with self.precision.forward(inputs.device):
                    loss = summed_loss(self.model(inputs), targets)
                (loss * (scale * self.precision.scale)).backward()
            loss_sum += loss.detach()  # no .item(): it waits for the device, once per micro-batch
        return loss_sum

    def _no_sync(self) -> contextlib.AbstractContextManager[object]:
        no_sync = getattr(self.model, "no_sync", contextlib.nullcontext)
        return no_sync()

    def _reduce(self) -> None:
        finish = getattr(self.model, "finish_gradient_synchronization", None)
        if finish is not None:
            finish()

    # --- 4. check, 5. update

    def _check(
        self, finished: int, loss_sum: torch.Tensor, count: int, norm: torch.Tensor
    ) -> float | None:
        """The loss, when it and the gradient norm are finite on every rank; None to back off."""
        grad_norm = norm.item()
        total, num_bad = self.ranks.sum(
            loss_sum, not math.isfinite(grad_norm), device=loss_sum.device
        )
        loss = total / count
        if num_bad and math.isfinite(loss) and self.precision.can_back_off:
            return None  # on all ranks: they have the same sums and the same scale
        if not math.isfinite(loss) or num_bad:
            raise NonFiniteError(
                f"rank {self.ranks.rank}, step {finished + 1}: expected a finite loss and gradient "
                f"norm, got loss {loss} (this rank's part of it: {loss_sum.item() / count}) and "
                f"norm {grad_norm}; nothing was updated. Lower the learning rate, clip with "
                "max_norm, or look at this step's data"
            )
        return loss

    def _set_learning_rate(self, finished: int) -> float:
        """Set the learning rate of this step; returns the first group's."""
        if self.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr(finished)
        return float(self.optimizer.param_groups[0]["lr"])

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # also what the optimizer does not hold

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the targets that count, in float32 or better."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
