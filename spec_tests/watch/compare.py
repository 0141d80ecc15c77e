"""Two runs of one script: the first step and tensor where they part beyond rounding.

Of each step a run keeps the loss, the norm of each gradient and the optimizer's options, of the
first step the norms of the weights too. Rounding is small at first and grows from step to step, by
less than a factor of 8; a difference that is larger than that is told. A gradient counts with a
share of the norm of all: one that is zero but for rounding has no digits to compare.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_tests.watch.run import Step

FILE = "steps.json"
KEPT = 1_000  # steps
_ROUNDING = {False: (1e-5, 0.01), True: (1e-2, 1.0)}  # in 16 bits; of a norm, share of all norms
_GROWTH = 8.0
Record = dict[str, Any]


def record(step: Step) -> Record:
    """Return what is kept of a step, in one number for all ranks each."""
    losses = [event["loss"] for event in step.events.values() if event["loss"] is not None]
    first = next(iter(step.events.values()))
    return {
        "at": [step.optimizer, step.number],
        "loss": sum(losses) / len(losses) if losses else None,
        "gradients": _whole(step, "norms"),
        "weights": _whole(step, "weights") if step.number == 1 else {},
        "options": first["options"],
        "is_low": any(event["is_low"] for event in step.events.values()),
    }


def _whole(step: Step, key: str) -> dict[str, float]:
    """Return name to norm, of shards put together."""
    found: dict[str, dict[tuple[Any, ...], float]] = {}
    for rank, event in step.events.items():
        for entry, value in zip(step.layout(rank), event[key], strict=True):
            where = (rank,) if entry["kind"] == "flat" else tuple(entry["shard"])
            if value is not None:
                found.setdefault(entry["name"], {}).setdefault(where, value)
    return {name: math.hypot(*parts.values()) for name, parts in found.items()}


def earlier(folder: str) -> list[Record]:
    """Return the steps of an earlier run, from the folder of its report."""
    try:
        found: list[Record] = json.loads((Path(folder) / FILE).read_text())
    except (OSError, ValueError):
        words = f"expected a folder that watch --report wrote, got {folder}"
        raise argparse.ArgumentTypeError(words) from None
    return found


def compare(ours: list[Record], theirs: list[Record]) -> tuple[bool, str]:
    """Return whether two runs part, and in words where, or how far they agree."""
    known = {tuple(each["at"]): each for each in reversed(theirs)}
    pairs = [(each, known[at]) for each in ours if (at := tuple(each["at"])) in known]
    if not pairs:
        return True, "the runs have no step in common"
    worst: dict[str, float] = {}
    for mine, other in pairs:
        rounding, _ = _ROUNDING[mine["is_low"] or other["is_low"]]
        now: dict[str, float] = {}
        for kind, of, a, b, off in _differences(mine, other):
            if off > max(rounding, _GROWTH * worst.get(kind, 0.0)):
                number, at = mine["at"]
                step = f"step {at}" + f" of optimizer {number}" * bool(number)
                found = f"{kind}{of} {_shown(a)} against {_shown(b)}"
                return True, f"the first difference beyond rounding: {step}, {found}{_agree(worst)}"
            now[kind] = max(now.get(kind, 0.0), off)
        worst = {kind: max(worst.get(kind, 0.0), now.get(kind, 0.0)) for kind in worst | now}
    return False, f"{len(pairs)} steps agree with the earlier run" + _agree(worst, ": ")


def _differences(mine: Record, other: Record) -> Iterator[tuple[str, str, Any, Any, float]]:
    """Yield kind, name, both values and their distance, causes before effects."""
    share = _ROUNDING[mine["is_low"] or other["is_low"]][1]
    yield from _of_norms("weight", mine["weights"], other["weights"], 0.0)
    if mine["options"] != other["options"]:
        pairs = [p for p in zip(mine["options"], other["options"], strict=False) if p[0] != p[1]]
        ours, theirs = pairs[0] if pairs else (len(mine["options"]), len(other["options"]))
        yield "options", " of the optimizer (lr, weight_decay),", ours, theirs, math.inf
    yield "loss", "", mine["loss"], other["loss"], _off(mine["loss"], other["loss"], 0.0)
    yield from _of_norms("gradient", mine["gradients"], other["gradients"], share)


def _of_norms(
    kind: str, ours: dict[str, float], theirs: dict[str, float], share: float
) -> Iterator[tuple[str, str, Any, Any, float]]:
    """Yield the last tensor first: its gradient is the first that a backward computes."""
    least = share * math.hypot(*(v for v in ours.values() if math.isfinite(v)))
    for name in [*reversed(ours), *(theirs.keys() - ours.keys())]:
        a, b = ours.get(name), theirs.get(name)
        yield kind, f" of {name!r}, norm", a, b, _off(a, b, least)


def _off(a: float | None, b: float | None, least: float) -> float:
    """Return how far two numbers are apart, as a share of the larger one."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), least, 1e-30)


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _agree(worst: dict[str, float], before: str = "; before it: ") -> str:
    many = {"weight": "weights", "loss": "losses", "gradient": "gradients"}
    said = [f"{many[kind]} {f'to {off:.0e}' if off else 'exactly'}" for kind, off in worst.items()]
    return f"{before}{', '.join(said)}" + " agree" * (before != ": ") if said else ""
