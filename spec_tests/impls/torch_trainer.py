"""PyTorch's own parts behind the trainer's contract: DDP, ZeroRedundancyOptimizer, FSDP2.

The order of a step is that of PyTorch's tutorials. Checkpoints are torch.distributed.checkpoint's
state dicts (`get_state_dict`) written by it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from spec_tests.impls.shared import LoopTrainer


class TorchTrainer(LoopTrainer):
    """DistributedDataParallel with whichever optimizer."""

    def __init__(
        self,
        strategy: str,
        module: nn.Module,
        make_optimizer: Any,
        *,
        loss: Any,
        accumulation: int = 1,
        max_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
        process_group: Any = None,
    ) -> None:
        self.module, self.loss, self.accumulation = module, loss, accumulation
        self.max_norm, self.dtype, self.group = max_norm, dtype, process_group
        self.strategy = strategy
        self.declares = {"start": "own"} if strategy == "fsdp" else {}
        self.model: Any
        if strategy == "fsdp":
            group: Any = dist.group.WORLD if process_group is None else process_group
            mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
            for part in module.children():
                if isinstance(part, nn.ModuleList):
                    for block in part:
                        fully_shard(block, mesh=mesh)
            self.model = fully_shard(module, mesh=mesh)
        else:
            self.model = DistributedDataParallel(
                module, process_group=process_group, find_unused_parameters=True
            )
        self.optimizer = self._optimizer(make_optimizer)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def _optimizer(self, make: Any) -> torch.optim.Optimizer:
        named = list(self.module.named_parameters())
        if self.strategy != "zero1":
            made: torch.optim.Optimizer = make(named)
            return made
        return ZeroRedundancyOptimizer(
            make.groups(named),
            optimizer_class=make.cls,
            process_group=self.group,
            **make.options,
        )

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """As the tutorials on accumulation and clipping do."""
        self.check(micro_batches)
        self.optimizer.zero_grad()
        losses = []
        for index, batch in enumerate(micro_batches):
            with self._window(index == len(micro_batches) - 1):
                found = self.forward(batch)
                losses.append(found.detach())
                (found / len(micro_batches)).backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        return torch.stack(losses).mean()

    def _window(self, is_last: bool) -> AbstractContextManager[Any]:
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(is_last)
            return contextlib.nullcontext()
        window: AbstractContextManager[Any] = self.model.no_sync()
        return contextlib.nullcontext() if is_last else window

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, under autocast where the trainer is narrow."""
        device = next(self.module.parameters()).device.type
        is_narrow = self.dtype != torch.float32
        with torch.autocast(device, dtype=self.dtype, enabled=is_narrow):
            found: torch.Tensor = self.loss(self.model, batch)
        return found

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
        """`full_tensor()` of what is sharded, after resharding the root."""
        if self.strategy == "fsdp":
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        named: dict[str, Any] = dict(self.module.named_parameters())
        return {
            name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
            for name, p in named.items()
        }

    def save(self, directory: Any) -> None:
        """torch.distributed.checkpoint."""
        dcp.save(self._state(), checkpoint_id=str(directory), process_group=self.group)

    def load(self, directory: Any) -> None:
        """The same, in place; then back into model and optimizer."""
        found = self._state()
        dcp.load(found, checkpoint_id=str(directory), process_group=self.group)
        states.set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        if self.strategy == "zero1":
            raise NotImplementedError("ZeroRedundancyOptimizer is no part of get_state_dict")
        model, optimizer = states.get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}


build_trainer = functools.partial(TorchTrainer, "ddp")
build_zero1_trainer = functools.partial(TorchTrainer, "zero1")
build_fsdp_trainer = functools.partial(TorchTrainer, "fsdp")
