"""A trainer in three strategies: everything around one optimizer step, behind `step`.

    build_trainer         replicas: DDP in buckets
    build_zero1_trainer   the same with the optimizer's state divided over the ranks
    build_fsdp_trainer    state, gradients and parameters divided: each item of a ModuleList is a
                          unit, and the root is one

For code that has a module, a loss and micro-batches, and no wish to call wrapper, accumulation,
clipping and checkpoints in the right order by itself. `solution.trainer` is the loop for language
models, with token counts and records; this is the same step for any loss.

One step: drop old gradients; forward and backward of every micro-batch, its loss divided by their
number, all but the last inside `no_sync`; finish the reduction; clip once by the global norm; step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from solution import comm, parallel
from solution.checkpoint import load_checkpoint, save_checkpoint
from solution.config import require_positive
from solution.parallel.clip import clip_grad_norm_
from solution.parallel.ddp import ddp_bucketed
from solution.parallel.fsdp import fully_shard
from solution.parallel.fsdp.api import full_parameters
from solution.parallel.zero1 import sharded_optimizer

Loss = Callable[[nn.Module, Any], torch.Tensor]
BUCKET_SIZE_MB = 25.0


class StrategyTrainer:
    """Steps, evaluations and checkpoints of one model; what is divided is the subclass's matter."""

    declares: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Any,
        *,
        loss: Loss,
        accumulation: int = 1,
        max_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
        process_group: comm.Group = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"expected max_norm > 0 or None, got {max_norm}")
        self._module, self._loss, self._group = module, loss, process_group
        self._num_micro_batches = require_positive("accumulation", accumulation)
        self._max_norm, self._dtype = max_norm, dtype
        self._trainable = _trainable(module)
        self._model = self._wrap(module)
        self._optimizer = self._make(make_optimizer)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def _wrap(self, module: nn.Module) -> nn.Module:
        return ddp_bucketed(module, bucket_size_mb=BUCKET_SIZE_MB, process_group=self._group)

    def _make(self, make_optimizer: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make_optimizer(self._module.named_parameters())
        return optimizer

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Take one optimizer step; returns the mean of this rank's losses, a 0-d tensor.

        Raises:
            ValueError: another number of micro-batches than `accumulation`.
            RuntimeError: parameters were frozen or thawed since the replicas were wrapped.
        """
        if len(micro_batches) != self._num_micro_batches:
            raise ValueError(
                f"rank {comm.rank(self._group)}: expected {self._num_micro_batches} micro-batches, "
                f"got {len(micro_batches)}; leave the rest of an epoch out, or build a trainer "
                "with another accumulation"
            )
        self._require_same_trainable()
        self._drop_gradients()
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self._no_sync():
                loss = self._forward(micro_batch)
                losses.append(loss.detach())
                (loss / len(micro_batches)).backward()
        parallel.finish_gradient_synchronization(self._model)
        if self._max_norm is not None:
            clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        self._drop_gradients()
        return torch.stack(losses).mean()

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return parallel.no_sync(self._model)

    def _forward(self, micro_batch: Any) -> torch.Tensor:
        if self._dtype == torch.float32:
            return self._loss(self._model, micro_batch)
        device = next(self._module.parameters()).device
        with torch.autocast(device.type, dtype=self._dtype):
            return self._loss(self._model, micro_batch)

    def _require_same_trainable(self) -> None:
        changed = sorted(self._trainable ^ _trainable(self._module))
        if changed:
            raise RuntimeError(
                f"rank {comm.rank(self._group)}: expected the parameters that were trainable at "
                f"construction, got changes of requires_grad at {', '.join(changed)}; build a new "
                "trainer after freezing or thawing"
            )

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)  # also what the optimizer does not hold

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return this rank's loss of the batch with current weights, in evaluation mode."""
        modes = [(part, part.training) for part in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                return self._forward(batch)
        finally:
            for part, is_training in modes:
                part.training = is_training

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the current weights, whole, by the names of the plain model."""
        return full_parameters(self._module)

    def set_lr(self, factor: float) -> None:
        """From now on use `factor` times each group's initial learning rate."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state below `directory`; see `save_checkpoint`."""
        save_checkpoint(
            directory,
            step=0,
            model=self._model,
            optimizer=self._optimizer,
            process_group=self._group,
        )

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Replace weights and optimizer state by what `save` wrote; see `load_checkpoint`."""
        load_checkpoint(
            directory, model=self._model, optimizer=self._optimizer, process_group=self._group
        )


class Zero1Trainer(StrategyTrainer):
    """Replicas whose optimizer state is divided."""

    def _make(self, make_optimizer: Any) -> torch.optim.Optimizer:
        return sharded_optimizer(
            make_optimizer.groups(self._module.named_parameters()),
            make_optimizer.cls,
            process_group=self._group,
            **make_optimizer.options,
        )


class FsdpTrainer(StrategyTrainer):
    """Shards; weights begin as the caller seeded them."""

    declares: ClassVar[dict[str, str]] = {"start": "own"}

    def _wrap(self, module: nn.Module) -> nn.Module:
        group = dist.group.WORLD if self._group is None else self._group
        assert group is not None
        mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
        for block in _blocks(module):
            fully_shard(block, mesh=mesh)
        sharded: nn.Module = fully_shard(module, mesh=mesh)
        return sharded

    def _require_same_trainable(self) -> None:
        """Shards may be frozen and thawed between steps."""


def build_trainer(module: nn.Module, make_optimizer: Any, **options: Any) -> StrategyTrainer:
    """Return a trainer of replicas, with the arguments of `StrategyTrainer`."""
    return StrategyTrainer(module, make_optimizer, **options)


def build_zero1_trainer(module: nn.Module, make_optimizer: Any, **options: Any) -> Zero1Trainer:
    """Return a trainer of replicas with a divided optimizer state."""
    return Zero1Trainer(module, make_optimizer, **options)


def build_fsdp_trainer(module: nn.Module, make_optimizer: Any, **options: Any) -> FsdpTrainer:
    """Return a trainer with divided parameters."""
    return FsdpTrainer(module, make_optimizer, **options)


def _trainable(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


def _blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Return the items of the outermost lists of modules that share no parameter with the rest."""
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
    blocks = [block for part in lists for block in part]
    owners: dict[nn.Parameter, set[int]] = {}
    for number, block in enumerate([*blocks, *(m for m in module.children() if m not in lists)]):
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(number)
    return [b for b in blocks if all(len(owners[p]) == 1 for p in b.parameters())]
