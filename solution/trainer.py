"""The training loop, for plain and for wrapped models: `train` runs it, a `Trainer` is its steps.

    global batch of a step = micro-batch x accumulation steps x ranks

One optimizer step (`Trainer.step`), on every rank:
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

The loop takes exactly the batches it uses, so a loader's state after n steps is n steps of data.
Sent per step beside the gradients: three float64 before the backward and two after it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from solution import comm, parallel
from solution.config import divisors, require_positive
from solution.parallel import clip
from solution.precision import Precision

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
    """The data ended before the steps did; no partial step was taken."""

    records: list[StepRecord]  # of the steps that were finished, where `train` raised it


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is NaN or infinite on some rank; nothing was updated."""


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
    if steps < 0:
        raise ValueError(f"expected steps >= 0, got {steps}")
    trainer = Trainer(
        model,
        optimizer,
        batches,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        max_norm=max_norm,
        lr=lr,
        precision=precision,
    )
    records: list[StepRecord] = []
    try:
        # Not `map`, which takes a StopIteration of `lr` for its own end.
        for finished in range(steps):
            records += [trainer.step(finished)]
    except DataExhaustedError as error:
        error.records = records
        raise
    return records


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return how many micro-batches each rank runs per optimizer step.

    Raises:
        ValueError: a size is not a positive integer, or micro_batch_size * world_size does not
            divide global_batch_size: rounding would train with another batch than asked for.

    >>> accumulation_steps(global_batch_size=32, micro_batch_size=8, world_size=2)
    2
    """
    require_positive("global_batch_size", global_batch_size)
    per_pass = require_positive("micro_batch_size", micro_batch_size)
    per_pass *= require_positive("world_size", world_size)
    if global_batch_size % per_pass:
        advice = f"choose a global_batch_size that is a multiple of {per_pass}"
        if global_batch_size % world_size == 0:
            advice += f", or micro_batch_size from {divisors(global_batch_size // world_size)}"
        raise ValueError(
            f"expected global_batch_size divisible by micro_batch_size * world_size, got "
            f"{global_batch_size} and {micro_batch_size} * {world_size}; {advice}"
        )
    return global_batch_size // per_pass


class Trainer:
    """The optimizer steps of one run; arguments and errors are those of `train`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[Batch],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        max_norm: float | None = None,
        lr: Callable[[int], float] | None = None,
        precision: str | Precision = "fp32",
    ) -> None:
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"expected max_norm >= 0 or None, got {max_norm}")
        self.model, self.optimizer, self.batches = model, optimizer, iter(batches)
        self.max_norm, self.lr, self.precision = max_norm, lr, Precision.of(precision)
        self.ranks = Ranks.of(model)
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = accumulation_steps(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=self.ranks.size,
        )

    def step(self, finished: int) -> StepRecord:
        """Take step number `finished + 1`; whatever happens, no gradient is left behind."""
        batches, count = self._fetch(finished)
        self._drop_gradients()  # what the caller left behind must not count
        num_skipped = 0
        try:
            while True:
                loss_sum = self._backward(batches, scale=self.ranks.size / count)
                self._reduce()
                norm = clip.total_norm(self.model.parameters())
                loss = self._check(finished, loss_sum, count, norm)
                if loss is not None:
                    break
                self._drop_gradients()  # an overflow of fp16: once more, with half the loss scale
                self.precision.back_off()
                num_skipped += 1
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

    def _fetch(self, finished: int) -> tuple[list[Batch], int]:
        """Return this rank's micro-batches, and how many targets count on all ranks."""
        batches, error = take(map(self._checked, self.batches), self.num_micro_batches)
        count = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in batches)
        is_short = error is None and len(batches) < self.num_micro_batches
        # One sum carries the count and the two reasons to stop, so that no rank stops alone and
        # leaves the others in a collective.
        total, num_short, num_failed = self.ranks.sum(
            count, is_short, error is not None, device=device_of(self.model)
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

    def _checked(self, batch: Batch) -> Batch:
        """Return the micro-batch on the model's device."""
        inputs, targets = batch
        if len(targets) != self.micro_batch_size:
            raise ValueError(
                f"rank {self.ranks.rank}: expected micro-batches of {self.micro_batch_size} "
                f"sequences, got targets of shape {tuple(targets.shape)}; set micro_batch_size to "
                "what the loader yields"
            )
        device = device_of(self.model)
        return inputs.to(device), targets.to(device)

    def _backward(self, batches: list[Batch], *, scale: float) -> torch.Tensor:
        """Accumulate gradients; return the unscaled sum of losses, still on the device."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
        for index, (inputs, targets) in enumerate(batches):
            is_last = index == len(batches) - 1
            with contextlib.nullcontext() if is_last else parallel.no_sync(self.model):
                with self.precision.forward(inputs.device):
                    loss = summed_loss(self.model(inputs), targets)
                (loss * (scale * self.precision.scale)).backward()
            loss_sum += loss.detach()  # no .item(): it waits for the device, once per micro-batch
        return loss_sum

    def _reduce(self) -> None:
        """Finish the reduction, and divide by the loss scale: .grad is the mean gradient."""
        parallel.finish_gradient_synchronization(self.model)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients and self.precision.scale != 1.0:
            torch._foreach_mul_(gradients, 1 / self.precision.scale)

    def _check(
        self, finished: int, loss_sum: torch.Tensor, count: int, norm: torch.Tensor
    ) -> float | None:
        """Return the loss if it and the norm are finite on every rank; None to back off."""
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
        """Set the learning rate of this step; return the first group's."""
        if self.lr is not None:
            rate = self.lr(finished)  # once: whoever counts its calls counts steps
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return float(self.optimizer.param_groups[0]["lr"])

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # also what the optimizer does not hold


@dataclass(frozen=True)
class Ranks:
    """The ranks whose gradients a model averages."""

    group: comm.Group
    size: int
    rank: int

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return those of the wrapper's group; this one alone if nothing wraps the model.

        Raises:
            ValueError: parts of the model are sharded, and the model itself is in no wrapper: whose
                gradients are averaged over whom, nobody could say of the whole.
        """
        sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
        if not (hasattr(model, "no_sync") or hasattr(model, "finish_gradient_synchronization")):
            if sharded is not None:
                raise ValueError(
                    f"expected a model that `fully_shard` took as a whole, got one ({type(model)}) "
                    "of which parts are sharded; call solution's fully_shard on the model itself, "
                    "too, after its parts"
                )
            return cls(None, 1, 0)
        group = getattr(model, "process_group", None)
        mesh = sharded.device_mesh if sharded is not None else None
        if mesh is not None and mesh.size() < comm.size(None):
            if mesh.ndim > 1:
                raise ValueError(
                    f"expected a mesh of one dimension, or of all ranks of {comm.size(None)}, got "
                    f"{mesh}"
                )
            group = mesh.get_group()
        return cls(group, comm.size(group), comm.rank(group))

    def sum(self, *numbers: float | torch.Tensor, device: torch.device) -> list[float]:
        """Sum each number over the ranks, in float64 (exact for counts below 2^53)."""
        if self.size == 1:
            return [float(number) for number in numbers]
        total = torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
        )
        comm.sum_over_ranks(total, self.group)
        return [float(number) for number in total.tolist()]


def take(batches: Iterator[Batch], number: int) -> tuple[list[Batch], Exception | None]:
    """Return up to `number` batches, and the error that ended them, if one did.

    The error is not raised here: the other ranks must learn of it first, or they wait for ever.
    """
    found: list[Batch] = []
    try:
        found.extend(itertools.islice(batches, number))
    except Exception as error:
        return found, error
    return found, None


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the targets that count, in float32 or better."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device
