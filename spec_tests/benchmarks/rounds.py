"""A round of a paired measurement, in the ranks: every arm for some steps, one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from spec_tests.benchmarks import paired
from spec_tests.rig.rank import Context


class Steps(Protocol):
    """What can be timed."""

    def step(self) -> None:
        """One optimizer step."""


def run_round(ctx: Context, arms: Sequence[Steps], num_steps: int, index: int) -> dict[str, Any]:
    """Every arm `num_steps` times, in the order of round `index`: seconds per step, and noise."""
    seconds, core_seconds = [0.0] * len(arms), [0.0] * len(arms)
    ctx.barrier()
    began, busy, own = time.perf_counter(), paired.busy_s(), time.process_time()
    for number in paired.order(len(arms), index):
        ctx.barrier()
        start, core_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            arms[number].step()
        seconds[number] = (time.perf_counter() - start) / num_steps
        core_seconds[number] = (time.process_time() - core_start) / num_steps
    ctx.barrier()
    now = paired.busy_s()
    return {
        "seconds": seconds,
        "core_seconds": core_seconds,
        "elapsed": time.perf_counter() - began,
        "own": time.process_time() - own,
        "busy": None if busy is None or now is None else now - busy,
    }
