"""The training loop, for plain and for wrapped models: `train`, and `training_steps` step by step.

    global batch of a step = micro-batch x accumulation steps x ranks

One optimizer step, on every rank:
1. fetch     take this step's micro-batches and agree with the other ranks on how many targets count
2. backward  for each micro-batch: forward and backward of the *sum* of its losses, times W / count;
             all but the last inside `no_sync`, so that gradients travel once
3. reduce    `finish_gradient_synchronization`: .grad is now the mean over the W ranks
4. check     loss and gradient norm are finite on all ranks, or all raise and nothing was updated
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from solution import comm, parallel
from solution.config import divisors, require_positive
from solution.parallel import clip

IGNORED_TARGET = -100
Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, Any], torch.Tensor]


class StepRecord(TypedDict):
    """Record of one optimizer step; equal on all ranks."""

    step: int  # finished steps, this one included
    loss: float  # mean over the targets that count, of all micro-batches and ranks
    lr: float  # the one this step used
    grad_norm: float  # of the mean gradient, before clipping
    tokens: int  # targets that counted, of all micro-batches and ranks


class DataExhaustedError(RuntimeError):
    """The data ended before the steps did; no partial step was taken."""


class NonFiniteError(FloatingPointError):
    """The loss or the gradient norm is NaN or infinite on some rank; nothing was updated."""


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    steps: int,
    **options: Any,
) -> list[StepRecord]:
    """Take `steps` steps of `training_steps`, which has the arguments; return their records."""
    return list(training_steps(model, optimizer, batches, steps=steps, **options))


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
    dtype: torch.dtype = torch.float32,
    finished: int = 0,
) -> Iterator[StepRecord]:
    """Take one optimizer step per item; yield its record. No gradient is left in between.

    Args:
        model: ids `[micro_batch_size, ...]` -> logits `[micro_batch_size, ..., classes]`; plain, or
            wrapped by something that has `no_sync` or `finish_gradient_synchronization`.
        optimizer: over the model's parameters.
        batches: `(inputs, targets)` of this rank, one micro-batch each; targets of -100 do not
            count. Exactly accumulation_steps of them are taken for each step.
        steps: the number of finished optimizer steps at the end.
        global_batch_size, micro_batch_size: sequences per optimizer step, all ranks together; and
            per batch of one rank.
        max_norm: clip the global gradient norm to this; None leaves gradients as they are.
        lr: learning rate as a function of the number of finished steps, for every parameter group;
            None leaves the groups' own.
        dtype: of a forward's matrix products; weights, gradients and optimizer state stay as they
            are.
        finished: optimizer steps that an earlier run has taken.

    Raises:
        ValueError: sizes that do not divide, a batch of another size, a step with no target.
        DataExhaustedError: `batches` ended early, on any rank; all ranks stop at the same step.
        NonFiniteError: on all ranks at the same step, before the update.
    """
    if steps < 0:
        raise ValueError(f"expected steps >= 0, got {steps}")
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"expected max_norm >= 0 or None, got {max_norm}")
    ranks, device = Ranks.of(model), device_of(model)
    mine = _micro_batches(batches, micro_batch_size, device)
    num_micro_batches = accumulation_steps(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=ranks.size,
    )

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        return summed_loss(model, batch, dtype)

    def taken() -> Iterator[StepRecord]:
        for step in range(finished + 1, steps + 1):
            where = f"rank {ranks.rank}, step {step}"
            micro_batches, count = _fetch(mine, num_micro_batches, ranks, device, where)
            scale = ranks.size / count
            with mean_gradient(model, optimizer, micro_batches, loss_of, scale=scale) as losses:
                norm = clip.total_norm(model.parameters())
                loss = _finite_loss(losses, norm.item(), count, ranks, where)
                if max_norm is not None:
                    clip.scale_to_norm_(model.parameters(), max_norm, norm)
                if lr is not None:
                    rate = lr(step - 1)  # once: a schedule may count its calls
                    for group in optimizer.param_groups:
                        kept = group["lr"]  # a tensor stays one: a compiled step reads it
                        group["lr"] = kept.fill_(rate) if isinstance(kept, torch.Tensor) else rate
                optimizer.step()
            rate = float(optimizer.param_groups[0]["lr"])
            yield StepRecord(step=step, loss=loss, lr=rate, grad_norm=norm.item(), tokens=count)

    return taken()  # what is refused above is refused now, not at the first step


@contextmanager
def mean_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Any],
    loss_of: Loss,
    *,
    scale: float,
) -> Iterator[list[torch.Tensor]]:
    """Compute the gradient of `scale` times the sum of all losses, as its mean over ranks.

    Inside the block it is in `.grad`. Gradients from before do not count, and none is left after.

    Yields:
        The loss of each micro-batch of this rank, without dims, on the model's device.
    """
    _drop_gradients(model, optimizer)
    try:
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else parallel.no_sync(model):
                loss = loss_of(model, micro_batch)
                (loss * scale).backward()
            losses.append(loss.detach())  # no .item(): it waits for the device, each time
        parallel.finish_gradient_synchronization(model)
        yield losses
    finally:
        _drop_gradients(model, optimizer)


def _drop_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)  # also what the optimizer does not hold


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


def _micro_batches(
    batches: Iterable[Batch], micro_batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Yield micro-batches on the model's device; ValueError for one of another size."""
    for inputs, targets in batches:
        if len(targets) != micro_batch_size:
            raise ValueError(
                f"expected micro-batches of {micro_batch_size} sequences, got targets of shape "
                f"{tuple(targets.shape)}; set micro_batch_size to what the loader yields"
            )
        yield inputs.to(device), targets.to(device)


def _fetch(
    batches: Iterator[Batch], number: int, ranks: Ranks, device: torch.device, where: str
) -> tuple[list[Batch], int]:
    """Return this rank's micro-batches of a step, and how many targets count on all ranks."""
    found: list[Batch] = []
    error: Exception | None = None
    try:
        found.extend(itertools.islice(batches, number))
    except Exception as caught:  # raised below: the other ranks learn of it first, or wait for ever
        error = caught
    count = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in found)
    is_short = error is None and len(found) < number
    # One sum carries the count and the two reasons to stop, so that no rank stops alone and leaves
    # the others in a collective.
    total, num_short, num_failed = ranks.sum(count, is_short, error is not None, device=device)
    if error is not None:
        raise error
    if num_failed:
        raise RuntimeError(
            f"{where}: expected every rank to read its data, but {num_failed:.0f} other rank(s) "
            "failed to; see their message"
        )
    if num_short:
        raise DataExhaustedError(
            f"{where}: expected {number} micro-batches, got {len(found)} here ({num_short:.0f} of "
            f"{ranks.size} ranks are short); this step was not taken. Ask for fewer steps, or give "
            "more data"
        )
    if not total:
        raise ValueError(
            f"{where}: expected targets that count, got only {IGNORED_TARGET} on all ranks; "
            "the mean over none is not defined, leave such batches out"
        )
    return found, int(total)


def _finite_loss(
    losses: list[torch.Tensor], norm: float, count: int, ranks: Ranks, where: str
) -> float:
    """Return the mean loss; NonFiniteError on all ranks unless it and all norms are finite."""
    own = torch.stack(losses).double().sum()
    total, num_bad = ranks.sum(own, not math.isfinite(norm), device=own.device)
    loss = total / count
    if not math.isfinite(loss) or num_bad:
        raise NonFiniteError(
            f"{where}: expected a finite loss and gradient norm, got loss {loss} (this rank's part "
            f"of it: {own.item() / count}) and norm {norm}; nothing was updated. Lower the "
            "learning rate, clip with max_norm, or look at this step's data"
        )
    return loss


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
            ValueError: parts of the model are sharded, and the model itself is in no wrapper, so
                no group of ranks averages all of its gradients.
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


def evaluate(
    model: nn.Module, batches: Iterable[Batch], *, dtype: torch.dtype = torch.float32
) -> float:
    """Return the mean loss over the targets that count, of all ranks and batches.

    The sum of losses and the number of targets are added over ranks and divided once: a mean of
    means would weigh a padded batch like a full one. Every rank gives equally many batches, since a
    sharded model's forward is a collective.

    Raises:
        ValueError: no target that counts, on all ranks alike.
    """
    ranks, device = Ranks.of(model), device_of(model)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(model):
        for inputs, targets in batches:
            batch = inputs.to(device), targets.to(device)
            loss_sum += summed_loss(model, batch, dtype)
            count += (batch[1] != IGNORED_TARGET).sum()
    total_loss, total_count = ranks.sum(loss_sum, count, device=device)
    if not total_count:
        raise ValueError(
            f"expected batches with targets that count, got none on {ranks.size} rank(s); "
            "the mean over none is not defined"
        )
    return total_loss / total_count


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode, without gradients; training afterwards is as without it.

    Every module goes back to the mode that *it* had, and random state (of the CPU and of the
    model's GPU) is what it was.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training


def summed_loss(model: nn.Module, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Return the cross-entropy summed over the targets that count, in float32 or better."""
    inputs, targets = batch
    with computing_in(dtype, inputs.device):
        logits = model(inputs)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return a context for a forward whose matrix products are of that dtype, by autocast."""
    if dtype == torch.float32:  # not a disabled autocast, which would end one of the caller's
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters; ValueError if there are none."""
    for parameter in model.parameters():
        return parameter.device
    raise ValueError(f"expected a model with parameters, got {type(model)} without any")
