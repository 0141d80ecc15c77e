"""Tokens per second of a training step once it is steady; and a sweep over batch sizes.

Lazy state, caches, compilation and an allocator's growth make first steps slow: steps are taken
until the median of the last three is within 5 % of that of the three before, 50 at most. Then 20
steps are timed one by one, the device's work finished before each look at the clock. Medians and a
spread: a mean of a block hides that one step in twenty took four times as long.

`sweep_batch_sizes` does that for several batch sizes. A row is the same whatever came before it:
the last model is gone before the next is built, and peaks are reset. Out of memory makes a row, not
an end. An exception holds the frames it went through, and they hold the model: nothing is freed
before the `except` block is left.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from solution.config import require_positive

WINDOW = 3  # steps whose median is compared with that of as many before
SETTLED = 0.05
MAX_WARMUP_STEPS = 50
DRIFT = 0.10  # between the halves of the timed steps, beyond which they were not steady after all

Step = Callable[[], Any]
Clock = Callable[[], float]


def measure_throughput(
    step: Step, *, tokens_per_step: int, clock: Clock, num_steps: int = 20
) -> dict[str, Any]:
    """Return the steady-state tokens per second of `step`.

    Args:
        step: one training step; may return before its device has finished.
        clock: seconds, from any origin: `time.perf_counter`.
        num_steps: that are timed after the warm-up.

    Returns:
        `tokens_per_s` and `steps_per_s` of the median step, `step_s` (that median), `min_s`,
        `iqr_s` (between the quartiles), `num_warmup_steps`, `num_steps`, `is_steady`.

    Raises:
        ValueError: a number that is not positive, or a clock that stands still.
    """
    require_positive("tokens_per_step", tokens_per_step)
    require_positive("num_steps", num_steps)

    def seconds() -> float:
        _finish_device_work()
        begun = clock()
        step()
        _finish_device_work()
        return clock() - begun

    warmup: list[float] = []
    while not _is_settled(warmup) and len(warmup) < MAX_WARMUP_STEPS:
        warmup.append(seconds())
    timed = [seconds() for _ in range(num_steps)]
    median = statistics.median(timed)
    if not median > 0:
        raise ValueError(
            f"expected a clock that advances, got a median step of {median} s; use "
            "time.perf_counter, or a step that takes longer"
        )
    quartiles = statistics.quantiles(timed if num_steps > 1 else 2 * timed, n=4, method="inclusive")
    return {
        "tokens_per_s": tokens_per_step / median,
        "steps_per_s": 1 / median,
        "step_s": median,
        "min_s": min(timed),
        "iqr_s": quartiles[2] - quartiles[0],
        "num_warmup_steps": len(warmup),
        "num_steps": num_steps,
        "is_steady": _is_settled(warmup) and not (num_steps > 1 and _differs(timed, by=DRIFT)),
    }


def _is_cuda_used() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _finish_device_work() -> None:
    if _is_cuda_used():
        torch.cuda.synchronize()


def _is_settled(seconds: Sequence[float]) -> bool:
    recent = seconds[-2 * WINDOW :]
    return len(recent) == 2 * WINDOW and not _differs(recent, by=SETTLED)


def _differs(seconds: Sequence[float], *, by: float) -> bool:
    """Return whether the medians of the two halves differ by more than this part of the first."""
    half = len(seconds) // 2
    first, last = statistics.median(seconds[:half]), statistics.median(seconds[-half:])
    return abs(last - first) > by * first


def sweep_batch_sizes(
    build: Callable[[int], Step],
    *,
    batch_sizes: Sequence[int],
    sequence_length: int,
    clock: Clock,
    memory: Any,
    num_steps: int = 20,
) -> list[dict[str, Any]]:
    """Return throughput and peak memory by batch size: one row each, in the order given.

    Args:
        build: from a batch size, in sequences, to a step that owns its model and optimizer.
        memory: whose peak is reported, of the steps, not of the building: `reset_peak()` begins
            anew with what is in use now, and `peak_bytes()` is the most since then.
        clock, num_steps: as for `measure_throughput`.

    Returns:
        Rows of `batch_size`, `is_oom`, `tokens_per_s` and `peak_bytes`; the last two are None where
        memory did not suffice. Any other error of `build` or of a step is raised.

    Raises:
        ValueError: no batch size, or one that is not positive.
        Any error but out of memory that `build` or a step raises.
    """
    if not batch_sizes:
        raise ValueError("expected at least one batch size, got none")
    for size in (*batch_sizes, sequence_length):
        require_positive("batch_sizes and sequence_length", size)

    def measured(size: int) -> dict[str, Any]:
        tokens = size * sequence_length
        row: dict[str, Any] = {"batch_size": size, "is_oom": False}
        try:
            step = build(size)
            memory.reset_peak()
            found = measure_throughput(
                step, tokens_per_step=tokens, clock=clock, num_steps=num_steps
            )
            return row | {"tokens_per_s": found["tokens_per_s"], "peak_bytes": memory.peak_bytes()}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return row | {"is_oom": True, "tokens_per_s": None, "peak_bytes": None}

    rows = []
    for size in batch_sizes:
        rows.append(measured(size))
        # Here neither the step nor an exception's frames are alive any more.
        gc.collect()  # modules and their hooks are in cycles
        if _is_cuda_used():
            torch.cuda.empty_cache()
    return rows


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory did not suffice; on the CPU that is a RuntimeError like many others."""
    return isinstance(error, torch.OutOfMemoryError) or (
        type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )
