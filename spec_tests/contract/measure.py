"""The contract of what is measured and predicted: memory, throughput, traces."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.contract.training import Path


def memory_estimate(
    model: nn.Module, *, batch_size: int, sequence_length: int
) -> Mapping[str, Any]:
    """Bytes of one training step of `model`, by term, predicted.

    The step: ids `[batch, seq]` -> logits -> their mean cross-entropy over all places -> backward
    -> AdamW, whose state exists already; gradients are None before, and nobody holds the logits
    after the loss. Tensors count in their own dtype, shared ones once; ids and targets do not.

    Keys, all int: `parameter_bytes`; `gradient_bytes` and `optimizer_bytes` of what is trainable
    (two moments; a counter per parameter counts or does not); `activation_bytes`, what forward and
    loss leave for the backward; `peak_bytes`, the most that is alive at any moment of the step, all
    terms and temporaries together. The last two within 5 %; an update may copy the gradients.
    Each answer is its own, whatever was asked before. The model (its gradients, modes and ties),
    generators and memory are afterwards as before. ValueError for sizes that are not positive.
    """


def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """Floating-point operations of a forward and a backward, per token; matrix products only.

    2 per weight and token in a forward, twice that in a backward; attention's two products are
    counted in full, causal or not. Lookups, norms and biases are none. ids `[1, seq]` are given.
    """


def measure_throughput(
    step: Callable[[], Any], *, tokens_per_step: int, clock: Callable[[], float]
) -> Mapping[str, Any]:
    """Steady-state tokens per second of `step`.

    `step()` is called until it takes a steady time, then some more times, each timed by itself with
    `clock() -> seconds`, the only clock. A step's work on a device is finished inside its time.
    There are at most 2000 calls, also where nothing is ever steady. What `step` raises goes to the
    caller as it is.

    Keys: `step_s`, the median; `tokens_per_s` and `steps_per_s`, of that median; `min_s` and
    `iqr_s` (between the quartiles); `num_warmup_steps`, not timed or not counted, and `num_steps`,
    at least 5; `is_steady`, false where steps get slower and slower. ValueError for tokens that are
    not positive.
    """


def sweep_batch_sizes(
    build: Callable[[int], Callable[[], Any]],
    *,
    batch_sizes: Sequence[int],
    sequence_length: int,
    clock: Callable[[], float],
    memory: Any,
) -> Sequence[Mapping[str, Any]]:
    """Throughput and peak memory by batch size: one row each, in the caller's order.

    `build(batch_size)` returns a `step`, which owns model and optimizer; each is gone, cycles and
    all, before the next is built. Steps are measured as by `measure_throughput`. Of memory, only
    `memory.reset_peak()` and `memory.peak_bytes()` are known; a row's peak is of its own steps.

    Keys: `batch_size`, `is_oom`, `tokens_per_s`, `peak_bytes`. Out of memory, a
    `torch.OutOfMemoryError` in `build` or in a step, makes a row with `is_oom` and None for the
    rest, and smaller sizes are still tried. Any other error goes to the caller.
    """


def model_flops_utilization(
    *,
    tokens_per_s: float,
    flops_per_token: float,
    device_name: str,
    dtype: torch.dtype,
) -> float | None:
    """The part of a device's peak that the model's own operations use, or None.

    `device_name` is `torch.cuda.get_device_name()`'s. The peak is the vendor's for dense products
    of that dtype, tensor cores where they take it (float32 is not TF32). None for a device that is
    not known: never a guess.
    """


def extrapolate_training(
    *,
    tokens_per_s: float,
    num_parameters: int,
    target_parameters: int,
    target_tokens: int,
    device_memory_bytes: int,
) -> Mapping[str, Any]:
    """What a measured rate of one device would mean for a larger model: a pure function.

    Tokens per second fall as parameters grow; a year has 365 days; a parameter in training takes 16
    bytes (float32: itself, its gradient, two moments). Keys: `tokens_per_s`, `days` and `years` of
    one device, `flops` (6 per parameter and token), `num_devices_for_memory`, rounded up.
    """


def summarize_trace(path: Path) -> dict[str, Any]:
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
