"""The contract: everything that an implementer has to read.

An implementation is a module, a package or a file with any of the functions below, by these
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

This file is the promise in words and types. What must hold, clause by clause, is in CLAUSES.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

Path = str | PathLike[str]


class Ddp(Protocol):
    """Replicate `module` over the group: each gradient is averaged by itself.

    Returns a module that is called like the original, whose `parameters()` are the original's, and
    whose `train()` and `eval()` reach it. At construction every rank takes the parameters (frozen
    ones too) and buffers of the group's first rank. After a backward pass and
    `finish_gradient_synchronization`, `.grad` of the *original* Parameter objects is the mean over
    the group of the local gradients; a local gradient is everything accumulated since
    `zero_grad`. Frozen parameters keep `grad is None`. A parameter unused on all ranks keeps
    None, or is an error no later than the next forward; unused on some ranks only, it holds
    the mean with zero for the absent, or is an error. Never a hang. The group decides who talks
    and by how many one divides. All ranks get the same bits, and equal runs give equal bits.
    Several forwards may feed one backward; a forward without gradients disturbs nothing. After a
    caught exception the next step is right, or an error.
    """

    def __call__(
        self, module: nn.Module, *, process_group: ProcessGroup | None = None
    ) -> nn.Module: ...


class DdpBucketed(Protocol):
    """As `ddp`, with the gradients packed into flat buckets of about `bucket_size_mb` MiB."""

    def __call__(
        self,
        module: nn.Module,
        *,
        bucket_size_mb: float,
        process_group: ProcessGroup | None = None,
    ) -> nn.Module: ...


class FinishGradientSynchronization(Protocol):
    """Called once after every backward that is outside `no_sync`, before the optimizer.

    Never called inside `no_sync`. Absent means that nothing is left to do after backward. A
    second call changes nothing.
    """

    def __call__(self, wrapped: nn.Module) -> None: ...


class NoSync(Protocol):
    """A context manager around forward *and* backward of a micro-batch.

    Inside, `.grad` holds plain local sums and nothing is sent. Other placements (only the forward,
    only the backward) are unspecified. It nests, and it restores the previous state also when the
    body raises.
    """

    def __call__(self, wrapped: nn.Module) -> AbstractContextManager[Any]: ...


class ShardedOptimizer(Protocol):
    """ZeRO-1: a `torch.optim.Optimizer` whose state is divided over the group.

    Gradients arrive already averaged. `step` updates what this rank owns and leaves all ranks with
    equal parameters; `.state` holds only owned state; `param_groups` are live, so a scheduler's
    change takes effect at the next step; `zero_grad` clears all gradients. `load_state_dict`, which
    all ranks call, takes the unsharded optimizer's state dict; `state_dict` gives that, or raises.
    """

    def __call__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> Optimizer: ...


class FullOptimizerState(Protocol):
    """On every rank, the state dict that the unsharded optimizer would have."""

    def __call__(self, optimizer: Optimizer) -> dict[str, Any]: ...


class FullyShard(Protocol):
    """FSDP in place, called bottom-up, with meaning and defaults of PyTorch's `fully_shard`.

    `mp_policy` is built from the implementation's own `MixedPrecisionPolicy(param_dtype=,
    reduce_dtype=, output_dtype=, cast_forward_inputs=)`. Parameters become DTensors sharded on dim
    0. The module then has `unshard`, `reshard`, `set_requires_gradient_sync`,
    `set_reshard_after_backward`, `set_modules_to_forward_prefetch` and
    `set_modules_to_backward_prefetch`. Weights are not synchronised: the caller seeds all ranks
    alike. After an update the next forward uses current weights; an update is `Optimizer.step`, a
    load function, or an in-place operation under `no_grad` on the Parameter or its local tensor,
    between steps. `zero_grad` clears what waits on this rank for its reduction, too.
    Level `production` asks for more of PyTorch's: `ignored_params`, a list of modules as one unit,
    and the setters that `spec_tests/fsdp/test_settings.py` names.
    """

    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        mp_policy: Any = None,
    ) -> Any: ...


class RegisterForwardMethod(Protocol):
    """Lets a method of a sharded module beside `forward` compute with full weights, too."""

    def __call__(self, module: nn.Module, method_name: str) -> None: ...


class MixedPrecisionPolicy(Protocol):
    """What `fully_shard` takes as `mp_policy`, with the meaning and defaults of PyTorch's.

    Weights are gathered and computed with in `param_dtype`, gradients reduced in `reduce_dtype`
    (else in `param_dtype`) and accumulated in it between reductions; floating-point inputs are cast
    to `param_dtype` unless `cast_forward_inputs` is false, outputs to `output_dtype`. Shards,
    gradients of shards and buffers keep their own dtype.
    """

    def __call__(
        self,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        cast_forward_inputs: bool = True,
    ) -> Any: ...


class Fsdp(Protocol):
    """The whole-model wrapper of the CS336 exercise: shards Linear and Embedding weights.

    Returns a module that is called like the original; DTensors are not asked for. An optimizer is
    built over its `parameters()` afterwards. `finish_gradient_synchronization` is called after
    every backward, as for `ddp`. With `compute_dtype` the sharded layers compute in it; what an
    optimizer sees keeps its dtype.
    """

    def __call__(
        self, module: nn.Module, *, compute_dtype: torch.dtype | None = None
    ) -> nn.Module: ...


class FullParameters(Protocol):
    """`{name: full tensor}` on every rank. Absent: `full_tensor()` where a parameter has it."""

    def __call__(self, model: nn.Module) -> Mapping[str, torch.Tensor]: ...


class ClipGradNorm(Protocol):
    """`torch.nn.utils.clip_grad_norm_` for replicated, sharded and mixed parameters.

    Returns the global norm as a plain tensor, equal on all ranks.
    """

    def __call__(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor: ...


class TokenLoader(Protocol):
    """Batches of next-token pairs over kjj0 `.bin` shards.

    A shard is 256 little-endian int32 header words (20240520, 1, count) and `count` uint16 tokens;
    the file ends there. Files in the caller's order. Sequence k of a shard is tokens `[kT, (k+1)T]`
    (T inputs, targets shifted by one); sequences never cross a shard; shards index one after
    another. Batch i of rank r is global sequences `[iWB + rB, iWB + rB + B)`; what does not fill
    W*B is dropped. One pass per `iter`, then it ends; the next `iter` starts anew.

    Yields int64 `[batch_size, sequence_length]` inputs and targets that own their memory.
    `state_dict()` counts batches *yielded*; after `load_state_dict` the next `iter` goes on there,
    also at another world size with the same W*B. RANK and WORLD_SIZE are read, both or neither,
    when not given. Bad arguments and bad files: ValueError at construction.
    """

    def __call__(
        self,
        paths: Sequence[Path],
        *,
        batch_size: int,
        sequence_length: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]: ...


class FlashAttention(Protocol):
    """Exact attention in O(N) memory. `flash_attention_triton` has the same shape.

    q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_k, head_dim]`; 3-D is
    `[batch, seq, head_dim]` without heads. `scale` defaults to `head_dim ** -0.5`. Causal is
    aligned bottom-right: row i sees keys j <= i + seq_k - seq_q. Query head h reads key head
    `h // (heads // kv_heads)`. Output has q's dtype; the LSE is natural, float32 (float64 for
    float64), `[batch, heads, seq_q]`, and either differentiable or marked non-differentiable.
    Rows that see nothing give zeros, -inf, and zero gradients. First derivatives only.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


class AccumulationSteps(Protocol):
    """Micro-batches per rank and optimizer step; ValueError when it does not divide."""

    def __call__(
        self, *, global_batch_size: int, micro_batch_size: int, world_size: int
    ) -> int: ...


class Train(Protocol):
    """The loop of the training chapter, for plain and wrapped models.

    One record per optimizer step: `loss`, `lr`, `grad_norm`, `tokens`. Targets of -100 do not
    count; loss and gradient are means over all valid tokens of the step on all ranks. The update
    after k finished ones uses `lr(k)`. Exactly the micro-batches of `steps` steps are taken.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
        *,
        steps: int,
        global_batch_size: int,
        micro_batch_size: int,
        max_norm: float | None = None,
        lr: Callable[[int], float] | None = None,
    ) -> Sequence[Any]: ...


class SaveCheckpoint(Protocol):
    """Write a complete checkpoint of `step` below `directory`, or nothing. All ranks call it.

    Complete is everything from which training goes on as if it had not stopped: parameters, buffers
    and optimizer state of the model, plain or wrapped, by the plain model's names; the loader's
    `state_dict()`; on each rank the state of torch's, NumPy's and Python's generators. Where
    replicas' buffers differ, the first rank's count. `step` counts finished optimizer steps. Saving
    and training have no effect on each other. A failure on any rank is an error on all, and leaves
    what was saved before. Saving a step again replaces it.
    """

    def __call__(
        self,
        directory: Path,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any = None,
    ) -> Any: ...


class LoadCheckpoint(Protocol):
    """Load the newest complete checkpoint below `directory`; returns its step. All ranks call it.

    Newest is the highest step. Values go into the parameters and optimizer that are given, at any
    world size; generators at that of the save. Incomplete or damaged saves are passed over, or are
    an error, as a model that does not fit is. Without any save: an error, or 0 and nothing changed.
    """

    def __call__(
        self, directory: Path, *, model: nn.Module, optimizer: Optimizer, loader: Any = None
    ) -> int: ...


class LanguageModel(Protocol):
    """A decoder: ids `[batch, seq]` -> logits `[batch, seq, vocab]`."""

    def __call__(
        self,
        *,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        embedding_dim: int,
        max_sequence_length: int,
    ) -> nn.Module: ...


class MemoryEstimate(Protocol):
    """Bytes of one training step of `model`, by term, predicted.

    The step: ids `[batch, seq]` -> logits -> their mean cross-entropy over all places -> backward
    -> AdamW, whose state exists already; gradients are None before, and nobody holds the logits
    after the loss. Tensors count in their own dtype, shared ones once; ids and targets do not.

    Keys, all int: `parameter_bytes`; `gradient_bytes` and `optimizer_bytes` of what is trainable
    (two moments; a counter per parameter counts or does not); `activation_bytes`, what forward and
    loss leave for the backward; `peak_bytes`, the most that is alive at any moment of the step, all
    terms and temporaries together. The model, generators and memory are afterwards as before.
    ValueError for sizes that are not positive.
    """

    def __call__(
        self, model: nn.Module, *, batch_size: int, sequence_length: int
    ) -> Mapping[str, Any]: ...


class FlopsPerToken(Protocol):
    """Floating-point operations of a forward and a backward, per token; matrix products only.

    2 per weight and token in a forward, twice that in a backward; attention's two products are
    counted in full, causal or not. Lookups, norms and biases are none. ids `[1, seq]` are given.
    """

    def __call__(self, model: nn.Module, *, sequence_length: int) -> int: ...


class MeasureThroughput(Protocol):
    """Steady-state tokens per second of `step`.

    `step()` is called until it takes a steady time, then some more times, each timed by itself with
    `clock() -> seconds`, the only clock. A step's work on a device is finished inside its time.
    Calls are bounded, also where nothing is ever steady. What `step` raises goes to the caller.

    Keys: `step_s`, the median; `tokens_per_s` and `steps_per_s`, of that median; `min_s` and
    `iqr_s` (between the quartiles); `num_warmup_steps`, not timed or not counted, and `num_steps`,
    at least 5; `is_steady`. ValueError for tokens that are not positive.
    """

    def __call__(
        self, step: Callable[[], Any], *, tokens_per_step: int, clock: Callable[[], float]
    ) -> Mapping[str, Any]: ...


class SweepBatchSizes(Protocol):
    """Throughput and peak memory by batch size: one row each, in the caller's order.

    `build(batch_size)` returns a `step`, which owns model and optimizer; each is gone, cycles and
    all, before the next is built. Steps are measured as by `measure_throughput`. Of memory, only
    `memory.reset_peak()` and `memory.peak_bytes()` are known; a row's peak is of its own steps.

    Keys: `batch_size`, `is_oom`, `tokens_per_s`, `peak_bytes`. Out of memory, a
    `torch.OutOfMemoryError` in `build` or in a step, makes a row with `is_oom` and None for the
    rest, and smaller sizes are still tried. Any other error goes to the caller.
    """

    def __call__(
        self,
        build: Callable[[int], Callable[[], Any]],
        *,
        batch_sizes: Sequence[int],
        sequence_length: int,
        clock: Callable[[], float],
        memory: Any,
    ) -> Sequence[Mapping[str, Any]]: ...


class ModelFlopsUtilization(Protocol):
    """The part of a device's peak that the model's own operations use, or None.

    `device_name` is `torch.cuda.get_device_name()`'s. The peak is the vendor's for dense products
    of that dtype, tensor cores where they take it (float32 is not TF32). None for a device that is
    not known: never a guess.
    """

    def __call__(
        self,
        *,
        tokens_per_s: float,
        flops_per_token: float,
        device_name: str,
        dtype: torch.dtype,
    ) -> float | None: ...


class ExtrapolateTraining(Protocol):
    """What a measured rate of one device would mean for a larger model: a pure function.

    Tokens per second fall as parameters grow; a year has 365 days; a parameter in training takes 16
    bytes (float32: itself, its gradient, two moments). Keys: `tokens_per_s`, `days` and `years` of
    one device, `flops` (6 per parameter and token), `num_devices_for_memory`, rounded up.
    """

    def __call__(
        self,
        *,
        tokens_per_s: float,
        num_parameters: int,
        target_parameters: int,
        target_tokens: int,
        device_memory_bytes: int,
    ) -> Mapping[str, Any]: ...


class SummarizeTrace(Protocol):
    """What one rank did in each step, from a Chrome trace of torch.profiler (JSON, or gzipped).

    A step is a host annotation (`user_annotation`) `ProfilerStep#N`. It begins there, but not
    before the one before has ended, and ends there, or with the last kernel launched in it (by
    correlation with a `cuda_runtime` or `cuda_driver` event) if that is later. Kernels (`kernel`,
    `gpu_memcpy`, `gpu_memset`) with `nccl` in their name communicate, and annotations `gloo:*`. All
    other kernels compute. Where there are none, operators (`cpu_op`) named `namespace::name` do, on
    any thread, but for the time that they spend inside a collective on the same thread;
    autograd:: and torch:: only call others, c10d:: and _c10d_functional:: are collectives.

    Returns `device` ("cuda" where there are kernels, else "cpu"); `rank`, `world_size` (0 and 1
    where `distributedInfo` is absent); `steps`, in order, dicts with `step` (N), `optimizer_steps`
    (annotations `Optimizer.step#*` that begin in it) and the times; `total`, the sums over steps;
    `collectives`; `peak_memory_bytes`. Times: `duration_us`, `compute_us`, `communication_us`,
    `overlap_us` (both at once), `exposed_us` (communication alone), `idle_us` (neither), each the
    length of a union of intervals, in microseconds; and `overlap_fraction` of the communication,
    None without any. `collectives` is kind to `count` and `bytes`, of all steps: kinds are
    all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce, gather, scatter, send,
    recv, barrier; from kernels (`Collective name`), else from operators of c10d, else from the
    annotations. `bytes` is the larger of what goes in and what comes out on this rank (`In msg
    nelems`, `Out msg nelems`, `dtype`; `Input Dims`, `Input type`, and for a `TensorList` the type
    of an annotation of the same dims); None where the trace does not say. `peak_memory_bytes` is
    the largest `Total Allocated` of `[memory]` with that device's `Device Type`, else None. What is
    no such trace, is cut off, or holds no step: ValueError, or OSError.
    """

    def __call__(self, path: Path) -> dict[str, Any]: ...


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

__all__ = ["DEFAULTS", "FUNCTIONS", "Iterator"]
