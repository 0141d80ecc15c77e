"""The contract: everything that an implementer has to read.

An implementation is a module, a package or a file with any of these functions, by these
names and with these arguments. What it leaves out is reported as "not offered", never as failed;
the same holds for a function that raises NotImplementedError. `solution/__init__.py` satisfies the
contract as it stands, and so does this file of five lines, as far as it goes:

    from torch.nn.parallel import DistributedDataParallel

    def ddp(module, *, process_group=None):
        return DistributedDataParallel(module, process_group=process_group)

    def no_sync(wrapped):
        return wrapped.no_sync()

Judge it with `python -m spec_tests --impl path/to/mine.py`. Outside of the domain stated here a
ValueError or NotImplementedError that names the argument is always right.

This is the promise in words and types; read the part that has the function you write:

    training.py   the loader, the loop, checkpoints
    models.py     attention, a language model
    parallel.py   replicas, sharded optimizers, fully_shard, clipping
    measure.py    estimates, measurements, traces

What must hold, clause by clause, is in CLAUSES.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec_tests.contract.measure import (
    ExtrapolateTraining,
    FlopsPerToken,
    MeasureThroughput,
    MemoryEstimate,
    ModelFlopsUtilization,
    SummarizeTrace,
    SweepBatchSizes,
)
from spec_tests.contract.models import (
    FlashAttention,
    LanguageModel,
)
from spec_tests.contract.parallel import (
    ClipGradNorm,
    Ddp,
    DdpBucketed,
    FinishGradientSynchronization,
    Fsdp,
    FullOptimizerState,
    FullParameters,
    FullyShard,
    MixedPrecisionPolicy,
    NoSync,
    RegisterForwardMethod,
    ShardedOptimizer,
)
from spec_tests.contract.training import (
    AccumulationSteps,
    LoadCheckpoint,
    Path,
    SaveCheckpoint,
    TokenLoader,
    Train,
)

FUNCTIONS: dict[str, type] = {
    "ddp": Ddp,
    "ddp_bucketed": DdpBucketed,
    "finish_gradient_synchronization": FinishGradientSynchronization,
    "no_sync": NoSync,
    "sharded_optimizer": ShardedOptimizer,
    "full_optimizer_state": FullOptimizerState,
    "fully_shard": FullyShard,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "register_fsdp_forward_method": RegisterForwardMethod,
    "fsdp": Fsdp,
    "full_parameters": FullParameters,
    "clip_grad_norm_": ClipGradNorm,
    "token_loader": TokenLoader,
    "flash_attention": FlashAttention,
    "flash_attention_triton": FlashAttention,
    "accumulation_steps": AccumulationSteps,
    "train": Train,
    "save_checkpoint": SaveCheckpoint,
    "load_checkpoint": LoadCheckpoint,
    "language_model": LanguageModel,
    "memory_estimate": MemoryEstimate,
    "flops_per_token": FlopsPerToken,
    "measure_throughput": MeasureThroughput,
    "sweep_batch_sizes": SweepBatchSizes,
    "model_flops_utilization": ModelFlopsUtilization,
    "extrapolate_training": ExtrapolateTraining,
    "summarize_trace": SummarizeTrace,
}
"""Every name of the contract, in the order of a training step."""

DEFAULTS: dict[str, Callable[..., Any]] = {
    "finish_gradient_synchronization": lambda wrapped: None,
    "full_parameters": lambda model: {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    },
}
"""What a function means where an implementation leaves it out; all others are not offered."""

__all__ = [
    "DEFAULTS",
    "FUNCTIONS",
    "AccumulationSteps",
    "ClipGradNorm",
    "Ddp",
    "DdpBucketed",
    "ExtrapolateTraining",
    "FinishGradientSynchronization",
    "FlashAttention",
    "FlopsPerToken",
    "Fsdp",
    "FullOptimizerState",
    "FullParameters",
    "FullyShard",
    "LanguageModel",
    "LoadCheckpoint",
    "MeasureThroughput",
    "MemoryEstimate",
    "MixedPrecisionPolicy",
    "ModelFlopsUtilization",
    "NoSync",
    "Path",
    "RegisterForwardMethod",
    "SaveCheckpoint",
    "ShardedOptimizer",
    "SummarizeTrace",
    "SweepBatchSizes",
    "TokenLoader",
    "Train",
]
