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
    """Predict the bytes of one training step of `model`, by term.

    The step: ids `[batch, seq]` -> logits -> their mean cross-entropy over all places -> backward
    -> AdamW, whose state exists already. Gradients are None before, and nobody holds the logits
    after the loss. Tensors count in their own dtype, shared ones once; ids and targets do not.

    Returns:
        Keys, all int: `parameter_bytes`; `gradient_bytes` and `optimizer_bytes` of what is
        trainable (two moments; a counter per parameter counts or does not); `activation_bytes`,
        what forward and loss leave for the backward; `peak_bytes`, the most that is alive at any
        moment of the step, all terms and temporaries together.

    Raises:
        ValueError: for sizes that are not positive.

    Level `course`:
        static-terms: Bytes of parameters, gradients and optimizer are exact.

    Level `correct`:
        trainable: Only trainable parameters have gradients and moments.
        activations: `activation_bytes` is within 5 %.
        peak: `peak_bytes` is within 5 %; an update may copy the gradients.
        own-answer: An answer does not depend on earlier calls.
        model-stays: Gradients, modes and ties of the model, and generators, are as before.
        memory-stays: Memory in use is as before.
        positive: Sizes that are not positive are a ValueError.

    Level `production`:
        meta: A model on the meta device is estimated in less than a hundredth of its memory.
    """


def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """Return the floating-point operations of a forward and a backward, per token.

    Args:
        model: takes ids `[1, sequence_length]`.

    Level `correct`:
        weights: 2 per weight and token in a forward, and twice that in a backward.
        attention: The two products of attention are counted in full, causal or not.
        products-only: Lookups, norms and biases are not counted.
    """


def measure_throughput(
    step: Callable[[], Any], *, tokens_per_step: int, clock: Callable[[], float]
) -> Mapping[str, Any]:
    """Measure the steady-state tokens per second of `step`.

    `step()` is called until it takes a steady time, then some more times.

    Args:
        clock: `clock()` returns seconds. It is the only clock.

    Returns:
        Keys: `step_s`, the median; `tokens_per_s` and `steps_per_s`, of that median; `min_s` and
        `iqr_s` (between the quartiles); `num_warmup_steps`, not timed or not counted, and
        `num_steps`; `is_steady`.

    Raises:
        ValueError: for tokens that are not positive.

    Level `course`:
        rate: Rates are those of a step by `clock`, each step timed by itself.
        warm-up: Steps before the steady ones do not count.
        device: A step's work on a device is finished inside its time.

    Level `correct`:
        median: The rate is that of the median step.
        spread: `min_s`, `iqr_s` and the numbers of steps are those of steps that were taken.
        five-steps: `num_steps` is at least 5.
        bounded: There are at most 2000 calls, also where nothing is ever steady.
        unsteady: `is_steady` is false where steps get slower and slower.
        errors: An error that `step` raises goes to the caller unchanged.
        positive: Tokens that are not positive are a ValueError.
    """


def sweep_batch_sizes(
    build: Callable[[int], Callable[[], Any]],
    *,
    batch_sizes: Sequence[int],
    sequence_length: int,
    clock: Callable[[], float],
    memory: Any,
) -> Sequence[Mapping[str, Any]]:
    """Measure throughput and peak memory by batch size.

    Args:
        build: `build(batch_size)` returns a `step`, which owns model and optimizer.
        clock: as for `measure_throughput`, by which steps are measured.
        memory: only `memory.reset_peak()` and `memory.peak_bytes()` are known.

    Returns:
        A row for each batch size, with `batch_size`, `is_oom`, `tokens_per_s` and `peak_bytes`.

    Level `course`:
        rows: There is one row for each batch size, in the caller's order.

    Level `correct`:
        one-model: Each step, with its model and optimizer, is gone before the next is built.
        own-peak: A row's peak is of its own steps.
        out-of-memory: On `torch.OutOfMemoryError` a row has `is_oom`, and None for the rest.
        goes-on: After a size that is out of memory smaller sizes are still tried.
        other-errors: Any other error goes to the caller.

    Level `production`:
        cycles: A step in a reference cycle, too, is gone before the next is built.
    """


def model_flops_utilization(
    *,
    tokens_per_s: float,
    flops_per_token: float,
    device_name: str,
    dtype: torch.dtype,
) -> float | None:
    """Return the part of a device's peak that the model's own operations use, or None.

    Args:
        device_name: of `torch.cuda.get_device_name()`.

    Level `correct`:
        dense-peak: The peak is the vendor's for dense products of that dtype.
        tensor-cores: The peak is of tensor cores where they take the dtype (float32 is not TF32).
        unknown: None for a device that is not known: never a guess.

    Level `production`:
        known: At least one of A100, H100 and H200 is known in bfloat16.
    """


def extrapolate_training(
    *,
    tokens_per_s: float,
    num_parameters: int,
    target_parameters: int,
    target_tokens: int,
    device_memory_bytes: int,
) -> Mapping[str, Any]:
    """Compute what a measured rate of one device would mean for a larger model: a pure function.

    Returns:
        Keys: `tokens_per_s`, `days` and `years` of one device; `flops`; `num_devices_for_memory`.

    Level `course`:
        rate: Tokens per second fall as parameters grow.
        days: A year has 365 days.

    Level `correct`:
        flops: `flops` is 6 per parameter and token.
        devices: A parameter in training takes 16 bytes; the number of devices is rounded up.
    """


def summarize_trace(path: Path) -> dict[str, Any]:
    """Summarize what one rank did in each step, from a trace of torch.profiler.

    Args:
        path: a Chrome trace (JSON), or the same gzipped.

    Returns:
        `device` ("cuda" where there are kernels, else "cpu"), `rank`, `world_size`; `steps`, in
        order, dicts with `step` (N), `optimizer_steps` and the times; `total`, the sums over steps;
        `collectives`, kind to `count` and `bytes`, of all steps; `peak_memory_bytes`.

        Times, in microseconds, each the length of a union of intervals: `duration_us`,
        `compute_us`, `communication_us`, `overlap_us` (both at once), `exposed_us` (communication
        alone), `idle_us` (neither); and `overlap_fraction` of the communication.

        Kinds: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce, gather,
        scatter, send, recv, barrier.

    Raises:
        ValueError, OSError: for another file, one that is cut off, or one without a step.

    Level `correct`:
        steps: A step is a host annotation (`user_annotation`) `ProfilerStep#N`.
        begins: A step begins at its annotation, but not before the step before has ended.
        ends: A step ends with its annotation, or with the last kernel launched in it if later.
        launched: A kernel belongs to the `cuda_runtime` or `cuda_driver` event of its correlation.
        kernels: Kernels are events of category `kernel`, `gpu_memcpy` and `gpu_memset`.
        communication: Kernels with `nccl` in their name and annotations `gloo:*` communicate.
        computation: All other kernels compute.
        operators: Without kernels, `cpu_op` events named `namespace::name` compute, on any thread.
        inside: Time that an operator spends in a collective on its thread is no computation.
        wrappers: autograd:: and torch:: only call others, and do not compute.
        collective-ops: c10d:: and _c10d_functional:: are collectives.
        times: Every time is the length of a union of intervals inside the step.
        fraction: `overlap_fraction` is None without communication.
        optimizer-steps: `optimizer_steps` counts annotations `Optimizer.step#*` that begin in it.
        rank: `rank` and `world_size` are those of `distributedInfo`, or 0 and 1 without it.
        collectives: Collectives are counted from kernels (`Collective name`) if there are any.
        fallbacks: Else collectives are counted from operators of c10d, else from annotations.
        bytes: `bytes` is the larger of the input and the output on this rank.
        kernel-bytes: Bytes of kernels are from `In msg nelems`, `Out msg nelems` and `dtype`.
        operator-bytes: Bytes of operators are from `Input Dims` and `Input type`.
        list-bytes: The tensors of a `TensorList` have the types of an annotation of the same dims.
        no-bytes: `bytes` is None where the trace does not say.
        peak-memory: The largest `Total Allocated` of `[memory]` of that `Device Type`, else None.
        refuses: Another file, one that is cut off or one without a step is a ValueError or OSError.

    Level `production`:
        names-file: The error for a file that is refused contains the name of the file.
    """
