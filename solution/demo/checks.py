"""The checks of the runs, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from solution.console import aligned
from solution.demo.runs import Run
from solution.demo.theory import Theory

__all__ = ["check", "distance", "table"]

MARGIN = 10.0  # between two right runs that differ in rounding, the control being one such pair

Bound = dict[str, Any]
"""`what` was bounded, the `largest` that came, what was `allowed`."""


def distance(run: Run, other: Run, out: Path, key: str) -> float:
    """Return the largest difference between two curves, over all steps."""
    pairs = zip(run.curve(out, key), other.curve(out, key), strict=True)
    return max(abs(a - b) for a, b in pairs)


def check(runs: Sequence[Run], theory: Theory, out: Path) -> tuple[list[Bound], list[str]]:
    """Return the bounds that applied, and what does not hold, one line each."""
    baseline, control, *others = runs
    bounds, problems = [], []
    # Adam and clipping hide a gradient of the wrong size from the loss, but not from its own norm.
    for key, title in (("loss", "losses"), ("grad_norm", "gradient norms")):
        noise = distance(control, baseline, out, key)
        rounding = 8 * torch.finfo(torch.float32).eps * max(baseline.curve(out, key))
        allowed = MARGIN * noise + rounding
        largest = max((distance(run, baseline, out, key) for run in others), default=0.0)
        said = f"{title}: at most {largest:.1e} from one rank; allowed {allowed:.1e}"
        print(f"{said} ({MARGIN:.0f} x control + 8 ulp)")
        bounds.append({"what": title, "largest": largest, "allowed": allowed})
        if not largest <= allowed:
            problems.append(f"FAILED: expected equal curves of {said}")
    losses = baseline.curve(out)
    if not losses[-1] < losses[0]:
        problems.append(f"FAILED: expected the loss to fall, got {losses[0]} to {losses[-1]}")
    for run in others:
        problems += _check_ranks(run, run.summaries(out), theory.sent(run))
        if run.is_killed:
            same = [other for other in others if other.name == run.name and other.kind == run.kind]
            problems += _check_restart(run, same[0], out)
    return bounds, problems


def _check_restart(run: Run, same: Run, out: Path) -> list[str]:
    """Return problems unless a run that was killed and restarted equals one that was not."""
    if not run.was_restarted(out):
        return [f"FAILED: {run.title}: expected another process after the kill, got the same"]
    differing = [
        key for key in ("loss", "grad_norm", "lr") if run.curve(out, key) != same.curve(out, key)
    ]
    weights = {s["weights_sha256"] for one in (run, same) for s in one.summaries(out)}
    if differing or len(weights) != 1:
        said = f"{', '.join(differing) or 'no curve'} differ, weights {weights}"
        return [f"FAILED: {run.title}: expected the bits of {same.title}, got: {said}"]
    print(f"{run.title}: every loss, norm and weight equal to those of {same.title}, bit for bit")
    return []


def _check_ranks(run: Run, summaries: Sequence[Mapping[str, Any]], expected: int) -> list[str]:
    problems = []
    weights = {summary["weights_sha256"] for summary in summaries}
    if len(weights) != 1:
        problems.append(f"FAILED: {run.title}: expected equal weights on all ranks, got {weights}")
    for summary in summaries:
        sent = summary["bytes_per_step"]
        if sent != expected:
            problems.append(
                f"FAILED: {run.title}, rank {summary['rank']}: expected {expected} bytes per step, "
                f"as its algorithm needs, got {sent} ({sent / max(expected, 1):.2f} x)"
            )
    return problems


def table(results: Mapping[str, Any]) -> str:
    """Return one line per run: where it ended, how far from one rank, what it cost."""
    rows = [["", "last loss", "differs", "norms", "tokens/s", "sent MB", "theory", "weights"]]
    rows += [
        [
            run["title"],
            f"{run['losses'][-1]:.6f}",
            f"{run['distance']['loss']:.1e}",
            f"{run['distance']['grad_norm']:.1e}",
            f"{run['tokens_per_s']:,.0f}",
            f"{run['traffic']['bytes'] / 1e6:.2f}",
            f"{run['traffic']['theory_bytes'] / 1e6:.2f}",
            run["weights"][:8],
        ]
        for run in results["runs"]
    ]
    return aligned(rows)
