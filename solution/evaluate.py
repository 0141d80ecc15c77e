"""Evaluation: the mean loss over batches, without any change to the model.

Every module goes back to the mode that *it* had: a part that was frozen in eval mode stays there.
No gradient is made or touched, random state (CPU and the model's GPU) is what it was. So training
with and without evaluations in between gives the same weights, bit for bit.

The sum of losses and the number of targets that count are added over ranks and divided once: a mean
of means would weigh a padded batch like a full one. All ranks see the same number of batches, or
all raise: before each batch they agree that every rank has one, since a sharded model's forward is
a collective. Sent per batch: two float64.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from solution.config import require_positive
from solution.precision import Precision
from solution.trainer import IGNORED_TARGET, Batch, Ranks, device_of, summed_loss, take


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    max_batches: int | None = None,
    precision: str | Precision = "fp32",
) -> float:
    """Mean loss over the targets that count, of all ranks and batches; the same on every rank.

    Args:
        model: plain or wrapped, as for `train`.
        batches: `(inputs, targets)` of this rank. A fresh `iter` of it is used.
        max_batches: stop after as many per rank; None takes all.
        precision: of the forward, as for `train`.

    Raises:
        ValueError: no batch, no target that counts, or ranks with different numbers of batches; on
            all ranks alike.
    """
    if max_batches is not None:
        require_positive("max_batches", max_batches)
    precision, ranks = Precision.of(precision), Ranks.of(model)
    device = device_of(model)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with _undisturbed(model, device), torch.no_grad():
        for inputs, targets in _in_step(itertools.islice(batches, max_batches), ranks, device):
            inputs, targets = inputs.to(device), targets.to(device)
            with precision.forward(device):
                loss_sum += summed_loss(model(inputs), targets)
            count += (targets != IGNORED_TARGET).sum()
    total_loss, total_count = ranks.sum(loss_sum, count, device=device)
    if not total_count:
        raise ValueError(
            f"expected batches with targets that count, got none on {ranks.size} rank(s); "
            "the mean over none is not defined"
        )
    return total_loss / total_count


def _in_step(batches: Iterator[Batch], ranks: Ranks, device: torch.device) -> Iterator[Batch]:
    """`batches`, as long as every rank has another; an error on all ranks if only some have."""
    for index in itertools.count():
        found, error = take(batches, 1)
        num_ready, num_failed = ranks.sum(len(found), error is not None, device=device)
        if error is not None:
            raise error
        if num_failed or 0 < num_ready < ranks.size:
            raise ValueError(
                f"rank {ranks.rank}: expected every rank to have batch {index}, but only "
                f"{num_ready:.0f} of {ranks.size} have ({num_failed:.0f} failed to read it); "
                "evaluate with a loader that gives all ranks equally many"
            )
        if not found:
            return
        yield found[0]


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode and a copy of the random state inside; every mode and the state as before after."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training
