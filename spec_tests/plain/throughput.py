"""Rates of training: tokens per second, a sweep over batch sizes, utilisation, extrapolation.

Problem: the first steps are slow (caches, compilation), single steps are noisy, and a sweep's sizes
disturb each other through memory that is still held.

Idea: warm up until two halves of the last ten steps agree; report the median of timed steps and the
spread between quartiles. Between sizes of a sweep drop the model, collect garbage, reset the peak.

Steps
    1. `measure_throughput`: 15 to 60 steps of warm-up, 9 timed ones, their median.
    2. `sweep_batch_sizes`: one such measurement per size; only out-of-memory errors become rows.
    3. `model_flops_utilization`: rate * operations per token / dense peak; None if it is unknown.
    4. `extrapolate_training`: time grows with parameters and tokens, operations are 6 N T.

Use
    report = measure_throughput(step, tokens_per_step=2048, clock=time.perf_counter)
    report["tokens_per_s"]

Cost: 24 to 69 steps per measurement, one garbage collection per size.

Source: Chowdhery et al. 2022, appendix B (MFU); Kaplan et al. 2020 (6 N T).
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

Step = Callable[[], Any]
Clock = Callable[[], float]
# Of dense products in bfloat16 and float16.
DENSE_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100-SXM4": 312.0}


def measure_throughput(step: Step, *, tokens_per_step: int, clock: Clock) -> dict[str, Any]:
    """Return the rate of the median step, the spread, and whether the steps became steady."""
    if tokens_per_step <= 0:
        raise ValueError(f"expected tokens, got {tokens_per_step}")

    def seconds() -> float:
        begun = clock()
        step()
        return clock() - begun

    warm_up: list[float] = []
    is_steady = False
    while len(warm_up) < 60 and not is_steady:
        warm_up.append(seconds())
        if len(warm_up) >= 15:
            before, last = (statistics.median(part) for part in (warm_up[-10:-5], warm_up[-5:]))
            is_steady = abs(last - before) < 0.05 * before
    timed = [seconds() for _ in range(9)]
    step_s = statistics.median(timed)
    lower, _, upper = statistics.quantiles(timed, n=4)
    return {
        "tokens_per_s": tokens_per_step / step_s,
        "steps_per_s": 1 / step_s,
        "step_s": step_s,
        "min_s": min(timed),
        "iqr_s": upper - lower,
        "num_warmup_steps": len(warm_up),
        "num_steps": len(timed),
        "is_steady": is_steady,
    }


def sweep_batch_sizes(
    build: Callable[[int], Step],
    *,
    batch_sizes: Sequence[int],
    sequence_length: int,
    clock: Clock,
    memory: Any,
) -> list[dict[str, Any]]:
    """Return a row for each size: rate and peak, or that it is out of memory."""

    def measured(size: int) -> dict[str, Any]:
        """Own the step, and with it the model: both are gone when this returns."""
        step = build(size)
        memory.reset_peak()
        report = measure_throughput(step, tokens_per_step=size * sequence_length, clock=clock)
        return {"tokens_per_s": report["tokens_per_s"], "peak_bytes": memory.peak_bytes()}

    rows = []
    for size in batch_sizes:
        try:
            row = {"is_oom": False, **measured(size)}
        except torch.OutOfMemoryError:
            row = {"is_oom": True, "tokens_per_s": None, "peak_bytes": None}
        gc.collect()
        rows.append({"batch_size": size, **row})
    return rows


def model_flops_utilization(
    *, tokens_per_s: float, flops_per_token: float, device_name: str, dtype: torch.dtype
) -> float | None:
    """Return the part of the dense peak that is used; None if the peak is not known."""
    peak = next((peak for part, peak in DENSE_TFLOPS.items() if part in device_name), None)
    if peak is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    return tokens_per_s * flops_per_token / (peak * 1e12)


def extrapolate_training(
    *,
    tokens_per_s: float,
    num_parameters: int,
    target_parameters: int,
    target_tokens: int,
    device_memory_bytes: int,
) -> dict[str, Any]:
    """Return how long a larger model takes on the same device, and on how many it fits."""
    rate = tokens_per_s * num_parameters / target_parameters
    days = target_tokens / rate / 86_400
    return {
        "tokens_per_s": rate,
        "days": days,
        "years": days / 365,
        "flops": 6 * target_parameters * target_tokens,
        "num_devices_for_memory": math.ceil(16 * target_parameters / device_memory_bytes),
    }


class PlainThroughput:
    """What this module offers."""

    @staticmethod
    def functions() -> dict[str, Any]:
        rates = (measure_throughput, sweep_batch_sizes)
        arithmetic = (model_flops_utilization, extrapolate_training)
        return {function.__name__: function for function in (*rates, *arithmetic)}
