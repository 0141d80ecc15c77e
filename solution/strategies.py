"""A trainer in three strategies: everything around one optimizer step, behind `step`.

    build_trainer         replicas: DDP in buckets
    build_zero1_trainer   the same with the optimizer's state divided over the ranks
    build_fsdp_trainer    state, gradients and parameters divided: each item of a ModuleList is a
                          unit, and the root is one

For code that has a module, a loss and micro-batches, and no wish to call wrapper, accumulation,
clipping and checkpoints in the right order by itself. The step is that of `solution.trainer`, for
any loss: each is divided by the number of micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from solution import comm
from solution.checkpoint import load_checkpoint, save_checkpoint
from solution.config import require_positive
from solution.parallel.clip import clip_grad_norm_
from solution.parallel.ddp import ddp_bucketed
from solution.parallel.fsdp import fully_shard
from solution.parallel.fsdp.api import full_parameters
from solution.parallel.zero1 import sharded_optimizer
from solution.trainer import Loss, computing_in, device_of, evaluating, mean_gradient

BUCKET_SIZE_MB = 25.0


class StrategyTrainer:
    """Steps, evaluations and checkpoints of one model.

    Args:
        model: `module` in its wrapper, with `optimizer` over its parameters.
        process_group: the ranks that take part; None is all.
        declares: choices that differ from the contract's defaults.

    The other arguments are those of the contract's `build_trainer`.
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss,
        process_group: comm.Group,
        accumulation: int = 1,
        max_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
        declares: Mapping[str, str] | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"expected max_norm > 0 or None, got {max_norm}")
        self.declares = declares or {}
        self._module, self._model, self._optimizer = module, model, optimizer
        self._loss, self._group = loss, process_group
        self._num_micro_batches = require_positive("accumulation", accumulation)
        self._max_norm, self._dtype = max_norm, dtype
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Take one optimizer step; returns the mean of this rank's losses, a 0-d tensor.

        Raises:
            ValueError: another number of micro-batches than `accumulation`.
            RuntimeError: a parameter of a replica was thawed since it was wrapped.
        """
        number = self._num_micro_batches
        if len(micro_batches) != number:
            raise ValueError(
                f"rank {comm.rank(self._group)}: expected {number} micro-batches, got "
                f"{len(micro_batches)}; leave the rest of an epoch out, or build a trainer with "
                "another accumulation"
            )
        with mean_gradient(
            self._model, self._optimizer, micro_batches, self._forward, scale=1 / number
        ) as losses:
            if self._max_norm is not None:
                clip_grad_norm_(self._model.parameters(), self._max_norm)
            self._optimizer.step()
        return torch.stack(losses).mean()

    def _forward(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        with computing_in(self._dtype, device_of(model)):
            return self._loss(model, micro_batch)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return this rank's loss of the batch with current weights, in evaluation mode."""
        with evaluating(self._model):
            return self._forward(self._model, batch)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the current weights, whole, by the names of the plain model."""
        return full_parameters(self._module)

    def set_lr(self, factor: float) -> None:
        """From now on use `factor` times each group's initial learning rate."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state below `directory`; see `save_checkpoint`."""
        model, optimizer = self._model, self._optimizer
        save_checkpoint(
            directory, step=0, model=model, optimizer=optimizer, process_group=self._group
        )

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Replace weights and optimizer state by what `save` wrote; see `load_checkpoint`."""
        load_checkpoint(
            directory, model=self._model, optimizer=self._optimizer, process_group=self._group
        )


def build_trainer(
    module: nn.Module, make_optimizer: Any, *, process_group: comm.Group = None, **options: Any
) -> StrategyTrainer:
    """Return a trainer of replicas, with the contract's arguments."""
    model = ddp_bucketed(module, bucket_size_mb=BUCKET_SIZE_MB, process_group=process_group)
    optimizer = make_optimizer(module.named_parameters())
    return StrategyTrainer(module, model, optimizer, process_group=process_group, **options)


def build_zero1_trainer(
    module: nn.Module, make_optimizer: Any, *, process_group: comm.Group = None, **options: Any
) -> StrategyTrainer:
    """Return a trainer of replicas with a divided optimizer state."""
    model = ddp_bucketed(module, bucket_size_mb=BUCKET_SIZE_MB, process_group=process_group)
    groups, kind = make_optimizer.groups(module.named_parameters()), make_optimizer.cls
    optimizer = sharded_optimizer(
        groups, kind, process_group=process_group, **make_optimizer.options
    )
    return StrategyTrainer(module, model, optimizer, process_group=process_group, **options)


def build_fsdp_trainer(
    module: nn.Module, make_optimizer: Any, *, process_group: comm.Group = None, **options: Any
) -> StrategyTrainer:
    """Return a trainer with divided parameters; weights begin as the caller seeded them."""
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    mesh = DeviceMesh.from_group(group, device_of(module).type)
    for part in (*_blocks(module), module):
        fully_shard(part, mesh=mesh)
    optimizer = make_optimizer(module.named_parameters())
    options |= {"process_group": process_group, "declares": {"start": "own"}}
    return StrategyTrainer(module, module, optimizer, **options)


def _blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Return the items of the outermost lists of modules that share no parameter with the rest."""
    lists = [part for part in module.children() if isinstance(part, nn.ModuleList)]
    blocks = [block for part in lists for block in part]
    owners: dict[nn.Parameter, set[int]] = {}
    for number, block in enumerate([*blocks, *(m for m in module.children() if m not in lists)]):
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(number)
    return [b for b in blocks if all(len(owners[p]) == 1 for p in b.parameters())]
