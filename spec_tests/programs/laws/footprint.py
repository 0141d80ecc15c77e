"""Footprint: bytes that stay or peak, written as a sum of named terms with a stated slack."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spec_tests.rig import judge
from spec_tests.rig.judge.evidence import of_memory
from spec_tests.rig.ranks.recorder import Recorder

Points = Sequence[tuple[str, int]]
"""Moments and the bytes that were held then, oldest first."""


def peak_bytes(device: torch.device, work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes above those at the start: the most at any time within `work`, and those left after it.

    On CPU as the allocator reports them to the profiler, so from Python, from operators and from
    within kernels alike. What `work` returns is alive at its end.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        left = torch.cuda.memory_allocated() - begun
        del result
        return torch.cuda.max_memory_allocated() - begun, left
    gc.collect()  # what earlier calls left in cycles must not be freed, and counted, in this one
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = work()
    del result
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]  # set once it has ended
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def settled(recorder: Recorder, *, looks: int = 4, pause_s: float = 0.001) -> int:
    """Live bytes, once a thread of the backend has let go of what it has just sent."""
    gc.collect()
    seen = []
    for _ in range(looks):
        time.sleep(pause_s)
        seen.append(recorder.live_bytes)
    return min(seen)


def at_most(
    observed: Sequence[int],
    terms: Mapping[str, int],
    *,
    quantity: str,
    likely: str = "",
    given: str = "",
    history: Sequence[Points] = (),
    moment: str = "",
) -> None:
    """No rank's bytes may exceed the sum of the terms.

    Args:
        observed: bytes, one number per rank.
        terms: what is allowed to be there, by name: {"gradients": 4096, "buckets": 4096}.
        history: what each rank held over time, `observed` last at `moment`: for a picture.

    Raises:
        Violation: naming the first rank that holds more.
    """
    __tracebackhide__ = True
    allowed = sum(terms.values())
    for rank, number in enumerate(observed):
        if number <= allowed:
            continue
        sum_of_terms = " + ".join(f"{name} {size}" for name, size in terms.items())
        raise judge.violated(
            f"rank {rank}: expected {quantity} of at most {allowed} bytes ({sum_of_terms}), "
            f"got {number}, {number / allowed:.2f} times that",
            likely=likely,
            given=given,
            evidence=shown(rank, history[rank] if history else [], moment, number, allowed),
        )


def shown(rank: int, points: Points, moment: str, number: int, allowed: int) -> dict[str, Any]:
    """Return a finding on memory for a picture: the last `moment` of `points`, or one number."""
    at = [index for index, point in enumerate(points) if tuple(point) == (moment, number)]
    if not at:
        return of_memory(rank, [("measured", number)], 0, allowed)
    return of_memory(rank, points, at[-1], allowed)
