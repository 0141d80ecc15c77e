"""DeepSpeed, behind the trainer's contract: stage 0 as `build_trainer`, 1 as zero1, 3 as fsdp.

DeepSpeed owns backward and step, so none of its parts fits the contract of a wrapper. Options that
change arithmetic are given: `gradient_clipping` is 1.0 by default, 0 is none. Parameters without a
gradient count as zeros, which is declared. There is no `process_group`: ranks that train are all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from spec_tests.impls.shared import LoopTrainer


class DeepSpeedTrainer(LoopTrainer):
    """An engine of one stage."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        make_optimizer: Any,
        *,
        loss: Any,
        accumulation: int = 1,
        max_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
        process_group: Any = None,
    ) -> None:
        if process_group is not None:
            raise NotImplementedError("deepspeed.initialize takes no process_group")
        self.module, self.loss, self.accumulation, self.stage = module, loss, accumulation, stage
        self.declares, self.dtype = {"unused": "zero"}, dtype
        config = {
            "train_micro_batch_size_per_gpu": 1,  # rows are none of its business
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": max_norm or 0.0,
            "zero_optimization": {
                "stage": stage,
                # Made for large models: a bucket of 5e8 elements is allocated whole, and parameters
                # below 1e5 elements stay on every rank.
                "reduce_bucket_size": 2**9,
                "stage3_param_persistence_threshold": 0,
            },
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
        }
        deepspeed.comm.comm.cdb = None  # of a process group that was destroyed since
        # Else init_distributed compiles an op for inference; ended meanwhile, it leaves a lock.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed("gloo")
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(list(module.named_parameters())),
            config=config,
            dist_init_required=False,
        )
        self.model = self.engine
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Forward, backward and step of the engine, which counts micro-batches by itself."""
        self.check(micro_batches)
        losses = []
        for batch in micro_batches:
            found = self.forward(batch)
            losses.append(found.detach())
            self.engine.backward(found)
            self.engine.step()
        return torch.stack(losses).mean()

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.loss(self._casting, batch)

    def _casting(self, x: torch.Tensor, **flags: Any) -> torch.Tensor:
        """The engine, which leaves it to the caller to cast inputs."""
        return self.engine(x.to(self.dtype), **flags)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The master weights, by DeepSpeed's own accessor."""
        return {name: self._full(p).float() for name, p in self.module.named_parameters()}

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        has_master = self.stage > 0 or self.dtype != torch.float32
        found = safe_get_full_fp32_param(parameter) if has_master else None
        if found is None and self.stage == 3:  # frozen: it has no master
            with deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach().clone() if found is None else found

    def save(self, directory: Any) -> None:
        """The engine's checkpoint."""
        self.engine.save_checkpoint(str(directory), tag="it")

    def load(self, directory: Any) -> None:
        """The same; DeepSpeed warns and returns None where it finds nothing."""
        path, _ = self.engine.load_checkpoint(str(directory), tag="it")
        if path is None:
            raise FileNotFoundError(f"DeepSpeed loaded nothing from {directory}")


build_trainer = functools.partial(DeepSpeedTrainer, 0)
build_zero1_trainer = functools.partial(DeepSpeedTrainer, 1)
build_fsdp_trainer = functools.partial(DeepSpeedTrainer, 3)
