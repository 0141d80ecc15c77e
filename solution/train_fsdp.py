"""Train GPT-2 or Llama fully sharded: every rank keeps a part of each parameter.

    torchrun --standalone --nproc-per-node=2 -m solution.train_fsdp --data outputs/data --steps 20
    torchrun --standalone --nproc-per-node=2 -m solution.train_fsdp --impl torch ...

`--strategy` says what is divided over the ranks, and how long full weights stay:

    FULL_SHARD       parameters, gradients, optimizer state; gathered for forward and for backward
    SHARD_GRAD_OP    the same; full weights stay from forward to backward (ZeRO-2)
    NO_SHARD         nothing: all ranks replicate, the arithmetic of data parallelism

`--impl torch` takes PyTorch's `fully_shard` instead, for comparison: the losses are the same, bit
for bit. Every block is a unit, and so is the rest. With several micro-batches per step,
`--reduce-grads` and `--reshard-after-backward` concern all but the last. Seed, data and order of
sequences are those of `train_baseline`, checkpoints are each other's. Flags and files:
`solution.job`, or `--help`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from solution import comm, job
from solution.parallel import fsdp as ours
from solution.train_config import TrainConfig, setting
from solution.world import World


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(TrainConfig):
    """A sharded run."""

    strategy: str = setting(
        "FULL_SHARD", "what is divided, and when", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"
    )
    impl: str = setting("solution", "whose fully_shard", "solution", "torch")
    param_dtype: str = setting("float32", "of gathers and compute", "float32", "bfloat16")
    reduce_dtype: str = setting("float32", "of gradients on their way", "float32", "bfloat16")
    reshard_after_backward: bool = setting(True, "free weights after all backwards, or the last")
    reduce_grads: bool = setting(False, "reduce gradients in all backwards, or the last")

    @property
    def name(self) -> str:  # type: ignore[override]  # of a class that always has the same one
        """The name of this run's files: runs that differ in what is sent lie side by side."""
        flags = {
            "kept": not self.reshard_after_backward,
            "reduce_grads": self.reduce_grads,
            "torch": self.impl == "torch",
        }
        words = [name for name, is_on in flags.items() if is_on]
        return "_".join((f"fsdp_{self.strategy.lower()}", *words))


class Accumulating(nn.Module):
    """A sharded model, ours or PyTorch's, behind the protocol that the trainer knows."""

    process_group: comm.Group = None  # all ranks

    def __init__(self, module: nn.Module, config: FsdpConfig) -> None:
        super().__init__()
        self.module = module
        self._sharded: Any = module  # FSDPModule is a mixin, not an nn.Module, for type checkers
        self._config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the micro-batches before the last; `reduce_grads` reduces them as well."""
        self._sharded.set_requires_gradient_sync(self._config.reduce_grads)
        self._sharded.set_reshard_after_backward(self._config.reshard_after_backward)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)
            self._sharded.set_reshard_after_backward(True)


def sharded(module: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """The model, sharded as the config says."""
    assert isinstance(config, FsdpConfig)
    implementation: Any = ours if config.impl == "solution" else theirs
    is_sharding = config.strategy != "NO_SHARD"
    mesh = init_device_mesh(
        world.device.type,
        (world.size,) if is_sharding else (world.size, 1),
        mesh_dim_names=("shard",) if is_sharding else ("replicate", "shard"),
    )
    options = {
        "mesh": mesh,
        "reshard_after_forward": False if config.strategy == "SHARD_GRAD_OP" else None,
        "mp_policy": implementation.MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.param_dtype),
            reduce_dtype=getattr(torch, config.reduce_dtype),
        ),
    }
    for block in module.blocks:  # type: ignore[union-attr]  # of both families a ModuleList
        implementation.fully_shard(block, **options)
    implementation.fully_shard(module, **options)
    return Accumulating(module, config)


def main() -> int:
    """The command; returns the exit status."""
    return job.main(sharded, FsdpConfig, "Train GPT-2 or Llama, sharded over ranks.")


if __name__ == "__main__":
    sys.exit(main())
