"""Plain, right measurements with every decision in a method: a rate, a sweep, an MFU.

The near-misses of the measure chapter override one decision. Fifteen steps of warm-up at least, and
one garbage collection per size: written apart from any solution, and benign.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_tests.impostors.card import Functions, Impostor

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


def offer_throughput(kind: type[PlainThroughput]) -> Functions:
    """The contract function of that measurement."""

    def measure_throughput(step: Any, *, tokens_per_step: int, clock: Any) -> dict[str, Any]:
        return kind(step, tokens_per_step, clock).report()

    return {"measure_throughput": measure_throughput}


def offer_sweep(kind: type[PlainSweep]) -> Functions:
    """The contract function of that sweep."""

    def sweep_batch_sizes(build: Any, *, memory: Any, **options: Any) -> Rows:
        return kind(build, memory, **options).rows()

    return {"sweep_batch_sizes": sweep_batch_sizes}


def offer_mfu(kind: type[PlainMfu]) -> Functions:
    """The contract function of that table."""

    def model_flops_utilization(
        *, tokens_per_s: float, flops_per_token: float, device_name: str, dtype: torch.dtype
    ) -> float | None:
        return kind().of(tokens_per_s, flops_per_token, device_name, dtype)

    return {"model_flops_utilization": model_flops_utilization}


def card(
    functions: Callable[[], Functions],
    words: str,
    does: str,
    seen: str,
    unseen: str,
    *rejected_by: str,
) -> Impostor:
    """A near-miss; it names clauses without their first word."""
    names = tuple(f"measure.{name}" for name in rejected_by)
    return Impostor(f"measure.{words}", does, seen, unseen, names, functions=functions)
