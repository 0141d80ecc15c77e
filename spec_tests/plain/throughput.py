"""Rates of training: tokens per second, a sweep over batch sizes, utilisation, extrapolation.

Problem: the first steps are slow (caches, compilation), single steps are noisy, and a sweep's sizes
disturb each other through memory that is still held.

Idea: warm up until two halves of the last ten steps agree; report the median of timed steps and the
spread between quartiles. Between sizes of a sweep drop the model, collect garbage, reset the peak.

Steps
    1. `PlainThroughput`: at least 15 and at most 60 steps of warm-up, 9 timed ones, their median.
    2. `PlainSweep`: one such measurement per size; only out-of-memory errors become rows.
    3. `PlainMfu`: rate * operations per token / dense peak of the device; None if it is unknown.
    4. `PlainExtrapolation`: time grows with parameters and tokens, operations are 6 N T.

Use
    report = PlainThroughput(step, tokens=2048, clock=time.perf_counter).report()
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

Rows = list[dict[str, Any]]


class PlainThroughput:
    """One measurement."""

    num_steps = 9

    def __init__(self, step: Callable[[], Any], tokens: int, clock: Callable[[], float]) -> None:
        self.check(tokens)
        self.step, self.tokens, self.clock = step, tokens, clock

    def check(self, tokens: int) -> None:
        if tokens <= 0:
            raise ValueError(f"expected tokens, got {tokens}")

    def seconds(self) -> float:
        begun = self.clock()
        self.step()
        return self.clock() - begun

    def warm_up(self) -> tuple[int, bool]:
        """How many steps it took, and whether they became steady."""
        seen: list[float] = []
        while len(seen) < 60:
            seen.append(self.seconds())
            if len(seen) >= 15 and self.is_level(seen):
                return len(seen), True
        return len(seen), False

    def is_level(self, seen: Sequence[float]) -> bool:
        before, last = (statistics.median(part) for part in (seen[-10:-5], seen[-5:]))
        return abs(last - before) < 0.05 * before

    def middle(self, timed: Sequence[float]) -> float:
        return statistics.median(timed)

    def spread(self, timed: Sequence[float]) -> float:
        lower, _, upper = statistics.quantiles(timed, n=4)
        return upper - lower

    def report(self) -> dict[str, Any]:
        num_warmup_steps, is_steady = self.warm_up()
        timed = [self.seconds() for _ in range(self.num_steps)]
        step_s = self.middle(timed)
        return {
            "tokens_per_s": self.tokens / step_s,
            "steps_per_s": 1 / step_s,
            "step_s": step_s,
            "min_s": min(timed),
            "iqr_s": self.spread(timed),
            "num_warmup_steps": num_warmup_steps,
            "num_steps": len(timed),
            "is_steady": is_steady,
        }

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""

        def measure_throughput(step, *, tokens_per_step, clock):
            return cls(step, tokens_per_step, clock).report()

        return {"measure_throughput": measure_throughput}


class PlainSweep:
    """One sweep."""

    def __init__(self, build: Callable[[int], Any], memory: Any, **options: Any) -> None:
        self.build, self.memory = build, memory
        self.sizes: list[int] = options["batch_sizes"]
        self.length: int = options["sequence_length"]
        self.clock: Callable[[], float] = options["clock"]

    def rows(self) -> Rows:
        return [self.row(size) for size in self.sizes]

    def row(self, size: int) -> dict[str, Any]:
        found = self.attempt(size)
        self.release()
        return {"batch_size": size, "is_oom": found is None, **(found or self.nothing())}

    def nothing(self) -> dict[str, Any]:
        return {"tokens_per_s": None, "peak_bytes": None}

    def attempt(self, size: int) -> dict[str, Any] | None:
        try:
            return self.measure(size)
        except torch.OutOfMemoryError:
            return None

    def measure(self, size: int) -> dict[str, Any]:
        step = self.build(size)
        self.reset()
        report = PlainThroughput(step, self.tokens(size), self.clock).report()
        return {"tokens_per_s": report["tokens_per_s"], "peak_bytes": self.memory.peak_bytes()}

    def tokens(self, size: int) -> int:
        return size * self.length

    def reset(self) -> None:
        self.memory.reset_peak()

    def release(self) -> None:
        gc.collect()

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""

        def sweep_batch_sizes(build, *, memory, **options):
            return cls(build, memory, **options).rows()

        return {"sweep_batch_sizes": sweep_batch_sizes}


class PlainMfu:
    """Utilisation; dense peaks in TFLOP/s."""

    peaks: tuple[tuple[str, float], ...] = (
        ("H200", 989.4),
        ("H100 80GB HBM3", 989.4),
        ("A100-SXM4", 312.0),
    )

    def of(self, rate: float, flops: float, name: str, dtype: torch.dtype) -> float | None:
        peak = self.peak(name) if dtype in (torch.bfloat16, torch.float16) else None
        return None if peak is None else rate * flops / (peak * 1e12)

    def peak(self, name: str) -> float | None:
        return next((peak for part, peak in self.peaks if part in name), None)

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""

        def model_flops_utilization(*, tokens_per_s, flops_per_token, device_name, dtype):
            return cls().of(tokens_per_s, flops_per_token, device_name, dtype)

        return {"model_flops_utilization": model_flops_utilization}


class PlainExtrapolation:
    """How long a larger model would take on the same device, and on how many it would fit."""

    days_per_year = 365.0
    rounded: Any = staticmethod(math.ceil)

    def of(self, *, target_parameters: int, target_tokens: int, **given: Any) -> dict[str, Any]:
        rate = given["tokens_per_s"] * given["num_parameters"] / target_parameters
        days = target_tokens / rate / 86_400
        needed = 16 * target_parameters / given["device_memory_bytes"]
        return {
            "tokens_per_s": rate,
            "days": days,
            "years": days / self.days_per_year,
            "flops": 6 * target_parameters * target_tokens,
            "num_devices_for_memory": self.rounded(needed),
        }

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""
        return {"extrapolate_training": cls().of}
